"""An engine whose devices add up through inboxes: its programs take them, and a device that is not
heard ends the step. XLA stands in for the kernel, which no CPU runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jax import Array

from jaxllm.cache.peers import BACKEND, PeerTimeout, Sums
from jaxllm.engine.engine import Engine
from jaxllm.engine.startup import model_plan
from jaxllm.sampling.options import SamplingParams
from pallas_kernels.all_reduce import Group, mosaic_gpu_peers, reference
from tests.engine.conftest import run

PROMPTS = [[5, 17, 3, 80, 41], list(range(40))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Engines add up by the kernel, in whose place XLA does. Each sum that was traced: its name,
    and the words of the inbox."""
    found: list[tuple[str, int]] = []

    def stand_in(name: str) -> Callable[..., Array]:
        def sums(*given: object) -> Array:
            [group] = [one for one in given if isinstance(one, Group)]
            assert group.inbox is not None
            assert 4 * group.inbox.words.size == group.inbox.layout.size
            found.append((name, group.inbox.words.size))
            return getattr(reference, name)(*given)

        return sums

    for name in ("add_norm", "all_reduce", "gather"):
        monkeypatch.setattr(mosaic_gpu_peers, name, stand_in(name))
    monkeypatch.setattr(mosaic_gpu_peers, "check", lambda group, part: _needs_inbox(group))
    monkeypatch.setattr(model_plan, "_sums", lambda *_: Sums(BACKEND, "as the test wants"))
    return found


def _needs_inbox(group: Group) -> None:
    if group.inbox is None:
        raise ValueError("no inboxes")


@pytest.mark.slow
def test_sums_go_through_inboxes_and_a_device_that_is_not_heard_fails_the_step(
    make_engine: Callable[..., Engine], used: list[tuple[str, int]]
) -> None:
    wanted = run(make_engine(), PROMPTS, GREEDY)
    assert not used
    engine = make_engine(tensor_parallel_size=2)
    assert run(engine, PROMPTS, GREEDY) == wanted
    assert {name for name, _ in used} == {"add_norm", "gather"}
    inboxes = engine.runner._inboxes
    assert inboxes is not None and {words for _, words in used} == {inboxes.layout.size // 4}
    before = inboxes._addresses
    inboxes._views[1][0] = 1  # as a kernel does whose peer stays silent
    with pytest.raises(PeerTimeout, match="of the 2 devices that add up, 1 waited in vain"):
        run(engine, PROMPTS, GREEDY)
    assert not engine.has_work
    assert run(engine, PROMPTS, GREEDY) == wanted
    assert inboxes._addresses == before
