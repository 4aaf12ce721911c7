"""Steps of an engine that generates: a forward, then a draw."""

from __future__ import annotations

import time

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.intake.pending import Pending
from jaxllm.engine.output.delivery import deliverable
from jaxllm.engine.output.output_processor import answer
from jaxllm.engine.output.running_requests import RunningRequests
from jaxllm.engine.output.step_observer import StepObserver
from jaxllm.engine.runtime.runner import ALL_USED, Collected, Runner, StepResult
from jaxllm.engine.scheduling.arrival_wait import ArrivalWait
from jaxllm.engine.scheduling.chunk_planner import added_by_chunks
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.steps.constrained import ConstrainedDraws, is_constrained
from jaxllm.engine.steps.loop import Launched, Turn
from jaxllm.engine.transfer.exports import PageExports
from jaxllm.messages import TextDelta

type InFlight = tuple[StepResult, ...]


class GeneratingSteps:
    """`Steps` of a generating engine.

    Attributes:
        arrival_wait: how long the caller may wait for requests before the next turn.
        starved: whether the last turn did nothing, and nothing was added or taken away since.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        grammars: Grammars,
        pending: Pending,
        requests: RunningRequests,
        draws: ConstrainedDraws,
        exports: PageExports,
        observers: StepObserver,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._grammars = grammars
        self._pending = pending
        self._requests = requests
        self._draws = draws
        self._exports = exports
        self._observers = observers
        self.arrival_wait = ArrivalWait()
        self.starved = False

    def is_blocked(self, in_flight: InFlight) -> bool:
        """Whether nothing can be done before a grammar is built or pages have come."""
        return (
            self._pending.blocked
            and not in_flight
            and (self.starved or not self._scheduler.has_work)
        )

    def admit(self, in_flight: InFlight, has_deltas: bool) -> list[TextDelta]:
        """Schedule choices whose grammar is built. Waits for one where nothing else can be done."""
        if not self._pending.unsettled:
            return []
        return self._pending.schedule_ready(not has_deltas and self.is_blocked(in_flight))

    def plan(self, in_flight: InFlight) -> Plan:
        """The next step. Its transfers between pool and host memory are started."""
        if lost := self._runner.lost():
            self._scheduler.drop_lost(lost)
        plan = self._scheduler.plan()
        if plan.moves is not None:
            self._runner.move(plan.moves)
        self.starved = plan.empty and plan.moves is None and not in_flight
        return plan

    def launch(self, plan: Plan, in_flight: InFlight) -> Launched[StepResult]:
        """Start the forward and the draw of a step.

        Where a draw depends on the tokens before it, the steps in flight are committed between the
        two, while the forward runs; their deltas are returned.
        """
        deltas: list[TextDelta] = []
        unused = ALL_USED
        if is_constrained(plan):
            forwarded, collected = self._draws.forward(
                plan, lambda: [self.collect(step) for step in in_flight]
            )
            in_flight = ()
            self._forward_launched(plan)
            restricted = self._draws.restrict(plan, collected)
            deltas += restricted.deltas
            unused = restricted.unused
        else:
            forwarded = self._runner.forward(plan)
            self._forward_launched(plan)
        step = self._runner.draw(forwarded, unused)
        deltas += map(answer, self._exports.answers(plan.chunks))
        return Launched((*in_flight, step), deltas)

    def collect(self, step: StepResult) -> Collected:
        """Wait for the oldest step in flight. Grammars follow its tokens."""
        collected = self._runner.collect(step)
        self._observers.step_collected(collected.plan)
        self._grammars.accept_step(collected.plan.emitters, collected.tokens, collected.unused)
        return collected

    def end_turn(self, turn: Turn[StepResult]) -> list[TextDelta]:
        """The deltas that clients get now; teaches how long to wait before the next turn."""
        if turn.margin is None or self._runner.depth != 1 or not turn.in_flight:
            self.arrival_wait.device_idle()
        else:
            buckets = self._runner.shapes.buckets
            added = added_by_chunks(self._runner.seconds, buckets, turn.plan)
            self.arrival_wait.step_launched(added, turn.margin)
        return self._exports.settle(deliverable(self._requests.holders, turn.deltas))

    def forget(self) -> None:
        """Forget every request and prefix."""
        self._draws.settle()
        self._pending.forget_all()
        for choice in self._requests.choices:
            self._grammars.release(choice)
        self._requests.clear()
        self._observers.steps_forgotten()

    def _forward_launched(self, plan: Plan) -> None:
        """What follows a forward at once. Pages are taken out before forced tokens end requests,
        which frees them."""
        self._exports.take(plan.chunks)
        self._observers.step_launched(plan)
        plan.mark_started(time.time())
