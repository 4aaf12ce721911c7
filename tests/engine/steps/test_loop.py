"""The loop itself, around steps that do nothing; and the order in which a step calls its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from jaxllm.cache.pool import PagePool
from jaxllm.engine.engine import Engine
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits, Plan
from jaxllm.engine.scheduling.request import Request
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.steps.loop import Launched, StepLoop, Turn
from jaxllm.engine.transfer.exports import NoExports
from jaxllm.messages import TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import reading_words, run


class Numbered(NamedTuple):
    """A step in flight."""

    number: int
    group: int


class CountedSteps:
    """Steps that are numbered; each says its number when it is committed. Plans are of the `groups`
    in turn until `last`; the call `fails` raises."""

    def __init__(self, last: int, groups: int = 1, fails: str = ""):
        self.last = last
        self.groups = groups
        self.fails = fails
        self.launched = 0
        self.forgotten = 0
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise MemoryError

    def admit(self, in_flight: tuple[Numbered, ...], has_deltas: bool) -> list[TextDelta]:
        self.note("admit")
        return []

    def plan(self, in_flight: tuple[Numbered, ...]) -> Plan:
        self.note("plan")
        ended = self.launched >= self.last
        decodes: Any = () if ended else (None,)
        return Plan(decodes, (), group=self.launched % self.groups)

    def launch(self, plan: Plan, in_flight: tuple[Numbered, ...]) -> Launched[Numbered]:
        self.note("launch")
        self.launched += 1
        return Launched((*in_flight, Numbered(self.launched, plan.group)), [])

    def collect(self, step: Numbered) -> int:
        self.note("collect")
        return step.number

    def commit(self, number: int) -> list[TextDelta]:
        self.note("commit")
        return [TextDelta(id=str(number), index=0, token_ids=[], text="")]

    def end_turn(self, turn: Turn[Numbered]) -> list[TextDelta]:
        self.note("end_turn")
        return turn.deltas

    def forget(self) -> None:
        self.forgotten += 1


class NoRequests:
    """Of an engine without requests."""

    ids: Sequence[str] = ()

    def lost(self) -> list[TextDelta]:
        return []


class Resets:
    """A device that counts how often it is made anew."""

    def __init__(self, depth: int):
        self.compiles = CompileCounter()
        self.depth = depth
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def loop_of(steps: CountedSteps, depth: int = 1, overlaps: bool = True) -> StepLoop[Numbered, int]:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(limits, [PagePool(8, 4, None)], Buckets.build(4, 64, "cpu"))
    return StepLoop(
        steps,
        steps.commit,
        NoRequests(),  # type: ignore[arg-type]
        Resets(depth),
        scheduler,
        Counters(),
        overlaps=overlaps,
    )


@pytest.mark.parametrize(
    ("depth", "overlaps", "groups", "said"),
    [
        (1, False, 1, [["1"], ["2"], ["3"], ["4"], [], []]),
        (1, True, 1, [[], ["1"], ["2"], ["3"], ["4"], []]),
        (2, True, 1, [[], [], ["1"], ["2"], ["3"], ["4"]]),
        (1, True, 2, [[], [], ["1"], ["2"], ["3"], ["4"]]),
    ],
    ids=["without overlap", "one in flight", "two in flight", "one of each group"],
)
def test_the_oldest_step_is_committed_when_more_are_in_flight_than_may_be(
    depth: int, overlaps: bool, groups: int, said: list[list[str]]
) -> None:
    loop = loop_of(CountedSteps(4, groups), depth, overlaps)
    assert [[delta.id for delta in loop.step()] for _ in said] == said
    assert loop.in_flight == () and not loop.has_work


def test_a_turn_calls_its_parts_in_their_order() -> None:
    steps = CountedSteps(2)
    loop = loop_of(steps)
    loop.step()
    steps.calls.clear()
    loop.step()
    assert steps.calls == ["admit", "plan", "launch", "collect", "commit", "end_turn"]


@pytest.mark.parametrize("call", ["admit", "plan", "launch", "collect", "commit", "end_turn"])
def test_whatever_fails_leaves_an_engine_that_goes_on(call: str) -> None:
    steps = CountedSteps(9)
    loop = loop_of(steps)
    loop.step()
    loop.unsent.append(TextDelta(id="aborted", index=0, token_ids=[], text=""))
    steps.fails = call
    with pytest.raises(MemoryError):
        loop.step()
    assert (loop.in_flight, loop.unsent, steps.forgotten) == ((), [], 1)
    assert loop._device.resets == 1  # type: ignore[attr-defined]
    steps.fails = ""
    assert loop.step() == [] and len(loop.in_flight) == 1


class NotedExports(NoExports):
    """Notes what a step calls, and how many tokens its requests have then."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def take(self, chunks: Any) -> None:
        self.calls.append("take")

    def answers(self, chunks: Any) -> list[Request]:
        self.calls.append("answers")
        return []

    def export(self, chunks: Any) -> None:
        self.calls.append("export")

    def settle(self, deltas: list[TextDelta]) -> list[TextDelta]:
        self.calls.append("settle")
        return deltas


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["take", "answers", "export", "settle"]),
        # The step before is committed between the forward and the draw
        ({"bad_words": ["1 2"]}, ["take", "export", "answers", "settle"]),
    ],
    ids=["plain", "constrained"],
)
def test_a_step_exports_pages_in_the_order_that_is_stated(
    make_engine: Callable[..., Engine], options: dict[str, Any], order: list[str]
) -> None:
    engine = reading_words(make_engine())
    exports = NotedExports()
    engine.steps._exports = exports
    engine.loop._commit._exports = exports  # type: ignore[attr-defined]
    run(engine, [[3, 4, 5]], SamplingParams(max_tokens=6, ignore_eos=True, **options))
    second = exports.calls.index("settle") + 1
    assert exports.calls[second : second + 4] == order
