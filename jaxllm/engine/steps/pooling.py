"""Steps of an engine that pools: one program, which gives a vector for each prompt."""

from __future__ import annotations

import time

import numpy as np

from jaxllm.engine.output.output_processor import LOST_REQUEST
from jaxllm.engine.output.step_observer import StepObserver
from jaxllm.engine.runtime.pooling_runner import PooledStep, PoolingRunner
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.steps.loop import Launched, Turn
from jaxllm.messages import TextDelta

NOT_FINITE = "the model's result is not finite; its weights overflow in this dtype (--dtype)"

type InFlight = tuple[PooledStep, ...]
type Vectors = tuple[Plan, list[np.ndarray]]


class PooledRequests:
    """The prompts that run or wait, by id; their ends free pages and slots."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._requests: dict[str, Request] = {}

    @property
    def ids(self) -> list[str]:
        """Those that run or wait."""
        return [*self._requests]

    def add(self, request: Request) -> None:
        """Schedule a new one."""
        self._scheduler.add(request)
        self._requests[request.id] = request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def finish(
        self, request: Request, reason: str, error: str | None = None, pooled: bytes | None = None
    ) -> TextDelta:
        """The end of a request."""
        self._scheduler.finish(request)
        del self._requests[request.id]
        return _ended(request, reason, error, pooled)

    def lost(self) -> list[TextDelta]:
        """The ends of all of them, for an engine that is about to forget them."""
        return [_ended(request, "error", LOST_REQUEST) for request in self._requests.values()]

    def clear(self) -> None:
        """Forget all."""
        self._requests.clear()


class PoolingSteps:
    """`Steps` of a pooling engine."""

    def __init__(
        self,
        runner: PoolingRunner,
        scheduler: Scheduler,
        requests: PooledRequests,
        observers: StepObserver,
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._requests = requests
        self._observers = observers

    def admit(self, in_flight: InFlight, has_deltas: bool) -> list[TextDelta]:
        """Prompts wait for nothing but slots and pages."""
        return []

    def plan(self, in_flight: InFlight) -> Plan:
        """The next step."""
        return self._scheduler.plan()

    def launch(self, plan: Plan, in_flight: InFlight) -> Launched[PooledStep]:
        """Start a step."""
        step = self._runner.launch(plan)
        self._observers.step_launched(plan)
        plan.mark_started(time.time())
        return Launched((*in_flight, step), [])

    def collect(self, step: PooledStep) -> Vectors:
        """Wait for the oldest step in flight."""
        vectors = self._runner.collect(step)
        self._observers.step_collected(step.plan)
        return step.plan, vectors

    def commit(self, collected: Vectors) -> list[TextDelta]:
        """End the requests whose prompts are complete."""
        plan, vectors = collected
        now = time.time()
        deltas = []
        for chunk, vector in zip(plan.chunks, vectors, strict=True):
            request = chunk.request
            if not chunk.final or request.status is Status.FINISHED:
                continue
            request.first_token_at = request.last_token_at = now
            if np.isfinite(vector).all():
                deltas.append(self._requests.finish(request, "stop", pooled=vector.tobytes()))
            else:
                self._scheduler.invalidate(request)
                deltas.append(self._requests.finish(request, "error", NOT_FINITE))
        return deltas

    def end_turn(self, turn: Turn[PooledStep]) -> list[TextDelta]:
        """All deltas: each is the only one of its request."""
        return turn.deltas

    def forget(self) -> None:
        """Forget every request and prefix."""
        self._scheduler.reset()
        self._requests.clear()
        self._observers.steps_forgotten()


def _ended(
    request: Request, reason: str, error: str | None = None, pooled: bytes | None = None
) -> TextDelta:
    return TextDelta(
        id=request.id,
        index=0,
        token_ids=[],
        text="",
        pooled=pooled,
        finish_reason=reason,
        num_cached_tokens=request.num_cached_tokens,
        prefix_miss=request.prefix_miss,
        times=request.times,
        error=error,
    )
