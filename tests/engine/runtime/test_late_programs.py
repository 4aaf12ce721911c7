"""Programs that an engine is ready without: it serves before they are made, and uses them then."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.late_programs import make_late
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.startup.started import _may_leave_late
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.sample import Sampler
from tests.engine.conftest import Outcome, outcomes

type MakeEngine = Callable[..., Engine]

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12, 13, 14, 15, 16, 17, 18, 19], [21]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=6, top_p=0.8, max_tokens=8, ignore_eos=True),
]


@pytest.fixture(scope="module")
def whole(every_shape: MakeEngine) -> Engine:
    """An engine that was started with all its programs."""
    return every_shape(enforce_eager=False)


@pytest.fixture
def early(every_shape: MakeEngine) -> Engine:
    """One that was started without late programs."""
    return every_shape(enforce_eager=False, leave_late=True)


def assert_alike(found: list[Outcome], expected: list[Outcome]) -> None:
    for one, other in zip(found, expected, strict=True):
        one.assert_like(other)


def ran(engine: Engine) -> set[Key]:
    """The programs that steps use from now on."""
    keys: set[Key] = set()
    call = engine.runner.call

    def noting(key: Key, *inputs: Any) -> list[Any]:
        keys.add(key)
        return call(key, *inputs)

    engine.runner.call = noting  # type: ignore[method-assign]
    return keys


def test_an_engine_answers_alike_before_and_after_its_late_programs_are_made(
    early: Engine, whole: Engine
) -> None:
    expected = outcomes(whole, PROMPTS, PARAMS)
    alone = outcomes(whole, PROMPTS[2:], PARAMS[1:2])
    missing = early.runner.programs.missing
    keys = ran(early)
    assert_alike(outcomes(early, PROMPTS, PARAMS), expected)
    assert_alike(outcomes(early, PROMPTS[2:], PARAMS[1:2]), alone)
    assert keys and not keys & missing, "steps take what is there"
    assert early.stats().missing_programs == len(missing)

    made: queue.SimpleQueue[None] = queue.SimpleQueue()
    early.make_late(lambda: made.put(None))
    for _ in missing:
        made.get(timeout=120)
    assert not early.runner.programs.missing
    stats = early.stats()
    assert (stats.late_programs, stats.missing_programs) == (len(missing), 0)

    keys.clear()
    assert_alike(outcomes(early, PROMPTS, PARAMS), expected)
    assert_alike(outcomes(early, PROMPTS[2:], PARAMS[1:2]), alone)
    assert keys & missing == {Key("extend", (16, 1, 0)), Key("sample", (1, Sampler.RANDOM))}
    assert early.stats().compiles_after_warmup == 0


def test_a_request_waits_for_the_program_that_it_needs_first(early: Engine, whole: Engine) -> None:
    params = [
        replace(PARAMS[0], logprobs=2, prompt_logprobs=1),
        replace(PARAMS[1], logit_bias={5: 3.0}),
        PARAMS[2],
    ]
    missing = early.runner.programs.missing
    assert_alike(outcomes(early, PROMPTS, params), outcomes(whole, PROMPTS, params))
    made = missing - early.runner.programs.missing
    assert {key.program for key in made} == {
        "logprobs",
        "process_logits",
        "prompt_logprobs",
        "set_slot",
    }
    stats = early.stats()
    assert stats.late_programs == len(made) and stats.compiles_after_warmup == 0


def test_what_a_late_shape_takes_is_estimated_between_those_that_were_timed(early: Engine) -> None:
    seconds, shapes = early.runner.seconds, early.runner.shapes.buckets
    assert set(seconds) == {*shapes.decode, *shapes.extend}
    assert all(took > 0 for took in seconds.values())


def test_no_program_is_begun_once_an_engine_is_told_to_stop(early: Engine) -> None:
    early.runner.programs.stop()
    thread = make_late(early.runner, lambda: None)
    thread.join(timeout=60)
    assert not thread.is_alive() and early.stats().late_programs == 0


def test_a_thread_that_makes_programs_is_none_that_python_ends(early: Engine) -> None:
    ready = threading.Event()
    thread = make_late(early.runner, ready.set)
    assert not thread.daemon
    assert ready.wait(timeout=60)
    early.runner.programs.stop()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("platform", "devices", "stages", "hosts", "pooling", "eager", "may"),
    [
        ("cpu", 1, 1, 1, None, False, True),
        ("gpu", 1, 1, 1, None, False, False),
        ("tpu", 1, 1, 1, None, False, False),
        ("cpu", 2, 1, 1, None, False, False),
        ("cpu", 1, 2, 1, None, False, False),
        ("cpu", 1, 1, 2, None, False, False),
        ("cpu", 1, 1, 1, "a pooler", False, False),
        ("cpu", 1, 1, 1, None, True, False),
    ],
)
def test_programs_are_left_for_later_on_one_cpu_device_only(
    platform: str, devices: int, stages: int, hosts: int, pooling: Any, eager: bool, may: bool
) -> None:
    """Elsewhere nothing is ever compiled in the way of a request."""
    device = SimpleNamespace(platform=platform)
    model: Any = SimpleNamespace(
        config=EngineConfig(model="demo", enforce_eager=eager),
        device=device,
        mesh=SimpleNamespace(size=devices),
        stage=SimpleNamespace(count=stages),
        wishes=SimpleNamespace(hosts=SimpleNamespace(count=hosts)),
        spec=SimpleNamespace(pooling=pooling),
    )
    assert _may_leave_late(model) == may


def test_an_engine_without_late_programs_makes_none(whole: Engine) -> None:
    before = threading.active_count()
    whole.make_late(lambda: pytest.fail("there was one to make"))
    assert threading.active_count() == before and jax.default_backend() == "cpu"
    assert (whole.stats().late_programs, whole.stats().missing_programs) == (0, 0)
