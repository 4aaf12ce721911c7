"""The loop of an engine: plan and launch a step, then collect and commit the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxllm.engine.output.counters import Counters
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import TextDelta


class Step(Protocol):
    """A step in flight: launched, and not collected."""

    @property
    def group(self) -> int:
        """The group of slots that run in it."""


class Launched[S: Step](NamedTuple):
    """What a launch leaves.

    Attributes:
        in_flight: the steps in flight, oldest first. The new one is the last.
        deltas: of steps that had to be committed before the draw.
    """

    in_flight: tuple[S, ...]
    deltas: list[TextDelta]


class Turn[S: Step](NamedTuple):
    """What a turn of the loop has done.

    Attributes:
        plan: its plan.
        deltas: all that came of it.
        in_flight: the steps that it leaves in flight, oldest first.
        margin: seconds from the end of its launch to the end of the last step that it collected;
            None if it collected none after the launch.
    """

    plan: Plan
    deltas: list[TextDelta]
    in_flight: tuple[S, ...]
    margin: float | None


class Steps[S: Step, C](Protocol):
    """What a turn does, in this order. `commit` stands beside it."""

    def admit(self, in_flight: tuple[S, ...], has_deltas: bool) -> list[TextDelta]:
        """Schedule requests that waited for something else than slots and pages. Returns the ends
        of those that can never be. May wait, unless there are deltas that clients want."""

    def plan(self, in_flight: tuple[S, ...]) -> Plan:
        """The next step."""

    def launch(self, plan: Plan, in_flight: tuple[S, ...]) -> Launched[S]:
        """Start a step that is not empty."""

    def collect(self, step: S) -> C:
        """Wait for the oldest step in flight."""

    def end_turn(self, turn: Turn[S]) -> list[TextDelta]:
        """The deltas that clients get now."""

    def forget(self) -> None:
        """Forget every request and prefix after a failure: pages that were planned may not have
        been written, and the index already offers them."""


class Requests(Protocol):
    """The requests that an engine has."""

    @property
    def ids(self) -> list[str]:
        """Those that run or wait."""

    def lost(self) -> list[TextDelta]:
        """The ends of all of them, for an engine that is about to forget them."""


class Device(Protocol):
    """What the loop wants of a runner.

    Attributes:
        compiles: counts compiled programs while it is entered.
        depth: steps that may be launched before the first of them is collected.
    """

    compiles: CompileCounter
    depth: int

    def reset(self) -> None:
        """Slot state and pages anew after a step that failed."""


class StepLoop[S: Step, C]:
    """Turns `steps` and `commit`, and keeps the engine usable whatever they raise.

    What is in flight is a value that a turn takes and gives. So a turn that fails leaves no half
    of a list behind.

    Attributes:
        in_flight: the steps that the last turn left in flight, oldest first.
        unsent: deltas made outside of turns: ends of requests that were aborted or lost.
    """

    def __init__(
        self,
        steps: Steps[S, C],
        commit: Callable[[C], list[TextDelta]],
        requests: Requests,
        device: Device,
        scheduler: Scheduler,
        counters: Counters,
        *,
        overlaps: bool,
    ):
        """With `overlaps`, a step is collected after the next one is launched."""
        self._steps = steps
        self._commit = commit
        self._requests = requests
        self._device = device
        self._scheduler = scheduler
        self._counters = counters
        self._overlaps = overlaps
        self.in_flight: tuple[S, ...] = ()
        self.unsent: list[TextDelta] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, as far as the loop and the scheduler know."""
        return bool(self.in_flight or self.unsent or self._scheduler.has_work)

    def step(self) -> list[TextDelta]:
        """Launch the next step, then collect and commit the oldest in flight, if more of its group
        are than the device's depth. Without overlap, that is the one just launched.

        Whatever it raises, every request is gone afterwards and the engine is empty and usable.
        """
        try:
            with self._device.compiles:
                turn = self._turn(self.in_flight)
                self.in_flight = turn.in_flight
                deltas = self._steps.end_turn(turn)
            self._scheduler.events.flush()
            return deltas
        except BaseException:
            self.start_over()
            raise

    def start_over(self) -> None:
        """Forget every request and prefix."""
        self._steps.forget()
        self.in_flight = ()
        self.unsent.clear()
        self._device.reset()

    def self_check(self) -> None:
        """Check an idle engine: references equal page tables, each page and slot is free once, and
        only pages with contents can be found.

        A problem is counted and shown by `stats`. The engine then starts over, and requests that it
        had lost end with an error.
        """
        self._counters.self_checks += 1
        self._counters.problem = ""
        try:
            self._scheduler.check()
            if ids := self._requests.ids:
                raise RuntimeError(f"requests neither run nor wait: {sorted(ids)[:8]}")
        except Exception as error:  # broken accounts may break the check itself
            self._counters.self_check_failures += 1
            self._counters.problem = str(error) or type(error).__name__
            ends = self._requests.lost()
            self.start_over()
            self.unsent += ends

    def _turn(self, in_flight: tuple[S, ...]) -> Turn[S]:
        deltas = self.unsent
        self.unsent = []
        deltas += self._steps.admit(in_flight, bool(deltas))
        plan = self._steps.plan(in_flight)
        if not plan.empty:
            launched = self._steps.launch(plan, in_flight)
            in_flight = launched.in_flight
            deltas += launched.deltas
        depth = self._device.depth if self._overlaps else 0
        margin = None
        while in_flight and (plan.empty or _count(in_flight, plan.group) > depth):
            launch_end = time.perf_counter()
            collected = self._steps.collect(in_flight[0])
            margin = time.perf_counter() - launch_end
            in_flight = in_flight[1:]
            deltas += self._commit(collected)
            if plan.empty:
                break
        return Turn(plan, deltas, in_flight, margin)


def _count(in_flight: tuple[Step, ...], group: int) -> int:
    """Steps of a group."""
    return sum(step.group == group for step in in_flight)
