"""Devices that do what a controller tells end as the controller's do."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxllm.commands import Sleep, UpdateWeights, WakeUp
from jaxllm.engine.engine import Engine
from jaxllm.engine.follow import Devices
from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.replay import (
    Command,
    Reset,
    encode,
    replay,
)
from jaxllm.engine.scheduling.plan import Moves
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import run

PROMPTS = [[3 + at, 1] * (4 + 3 * at) for at in range(4)]
# So few pages that requests are swapped
WISHES = {"num_gpu_blocks_override": 16, "preemption_mode": "swap", "swap_space": 0.001}


def leading(make_engine: Callable[..., Engine], **wishes: object) -> tuple[Engine, Engine, set]:
    """An engine, one whose devices follow it, and the kinds of commands so far."""
    first, second = make_engine(**wishes), make_engine(**wishes)
    kinds = set[type]()
    devices = Devices(second.runner, second.sleeper.source)

    def tell(command: Command) -> None:
        kinds.add(type(command))
        replay(encode(command), devices)

    first.runner.tell = tell
    return first, second, kinds


def resident(engine: Engine) -> list[np.ndarray]:
    """Weights, pages and slot state."""
    runner = engine.runner
    return [np.asarray(x) for x in jax.tree.leaves((runner.weights, runner.kv, runner.state))]


@pytest.mark.slow  # two engines
def test_devices_that_follow_hold_what_the_controllers_hold(
    make_engine: Callable[..., Engine],
) -> None:
    first, second, kinds = leading(make_engine, **WISHES)
    greedy = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    before = run(first, PROMPTS, greedy)
    assert kinds == {Launch, Moves}
    assert second.runner.traffic.loaded > 0
    first.loop.start_over()  # as after a step that failed
    for level in (1, 2):
        first.sleeper.sleep(level)
        first.sleeper.wake_up()
    assert kinds == {Launch, Moves, Reset, Sleep, WakeUp, UpdateWeights}
    assert run(first, PROMPTS, greedy) == before
    for mine, theirs in zip(resident(second), resident(first), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_pages_that_a_follower_lost_end_it(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, _ = leading(make_engine, **WISHES)
    devices = Devices(second.runner, second.sleeper.source)
    monkeypatch.setattr(second.runner.swapper, "lost", lambda: [7])
    with pytest.raises(RuntimeError, match="did not reach host memory"):
        devices.move(Moves((), (), ()))


@pytest.mark.parametrize("command", [b"", b"\x80", b"\x81\xa4type\xa6System"])
def test_what_is_no_command_is_refused(command: bytes) -> None:
    with pytest.raises(ValueError):
        replay(command, None)  # type: ignore[arg-type]


def test_a_launch_is_the_same_on_its_other_side() -> None:
    class Noted:
        def run(self, launch: Launch) -> None:
            self.launch = launch

    noted = Noted()
    buffer = np.arange(5, dtype=np.int32)
    replay(encode(Launch(((Key("decode", (8,)), buffer),))), noted)  # type: ignore[arg-type]
    ((key, found),) = noted.launch.calls
    assert key == Key("decode", (8,))
    np.testing.assert_array_equal(found, buffer)
