"""An engine that pools: prompts enter, steps run, a vector of each comes out."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.engine.intake.queue_limit import QueueLimit
from jaxllm.engine.intake.validation import pooling, validate_pooling
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.engine_view import EngineWatch
from jaxllm.engine.output.step_observer import StepObservers
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.scheduling.plan import Traffic
from jaxllm.engine.scheduling.request import Request
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.sleep import Sleeper
from jaxllm.engine.startup.started import Started
from jaxllm.engine.steps.loop import StepLoop
from jaxllm.engine.steps.pooling import PooledRequests, PoolingSteps
from jaxllm.messages import EngineStats, GenerateRequest, PoolingRequest, TextDelta


class PoolingEngine:
    """Runs prompts on one mesh, each to one vector. Not thread-safe.

    The calls are those of `Engine`: a front end drives either. A prompt is a request that ends
    with its last chunk; order, chunks, pages and shared prefixes are the scheduler's.
    """

    awaits_grammar = False  # as of `Engine`

    def __init__(self, parts: Started, scheduler: Scheduler):
        runner = parts.runner
        assert isinstance(runner, PoolingRunner)
        self.resolved = parts.resolved
        self.tokenizer = parts.tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.watch = EngineWatch(scheduler)
        self.requests = PooledRequests(scheduler)
        self._queue = QueueLimit(self.resolved)
        self._counters = Counters()
        steps = PoolingSteps(
            runner, scheduler, self.requests, StepObservers(self._counters, self.watch)
        )
        self.loop = StepLoop(
            steps,
            steps.commit,
            self.requests,
            runner,
            scheduler,
            self._counters,
            overlaps=self.resolved.async_scheduling,
        )
        self.sleeper = Sleeper(parts, scheduler.reset, lambda: self.has_work)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.loop.has_work

    @property
    def wait_seconds(self) -> float:
        """How long the caller may wait for requests before `step()`: not at all."""
        return 0.0

    def when_built(self, callback: Callable[[], None]) -> None:
        """As of `Engine`; no grammars are built here."""

    def add(self, request: PoolingRequest | GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it can never run or the queue is full."""
        self.enter(self.validate(request))

    def validate(self, request: PoolingRequest | GenerateRequest) -> PoolingRequest:
        """The request. Raises RequestError when it can never run here."""
        request = pooling(request)
        self.sleeper.check_awake()
        validate_pooling(request, self.resolved, self.scheduler.fits)
        return request

    def queue_has_space(self, request: PoolingRequest) -> bool:
        """Whether the queue takes the request now; an idle engine takes any."""
        return self._queue.has_space(self._present, 1)

    def enter(self, request: PoolingRequest) -> None:
        """Queue a validated request. Raises RequestError when the queue is full."""
        self._queue.check(self._present, 1)
        self.requests.add(
            Request(
                id=request.id,
                index=0,
                prompt=request.prompt,
                params=request.params,
                seed=0,
                arrival=request.arrival,
                max_tokens=1,
                cache_salt=request.cache_salt,
                second_text=request.second_text,
            )
        )
        self._counters.prompt_tokens += len(request.prompt.tokens)

    def uncached_tokens(self, request: PoolingRequest) -> int:
        """Prompt tokens of a request that has just entered which must be computed, as known now."""
        return self.scheduler.kv_manager.uncached_tokens(self.requests[request.id])

    def abort(self, request_id: str) -> None:
        """Stop a request and free its pages now. Unknown ids are ignored."""
        if request_id in self.requests:
            self.loop.unsent.append(self.requests.finish(self.requests[request_id], "abort"))

    def step(self) -> list[TextDelta]:
        """As of `StepLoop`."""
        return self.loop.step()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As of `Scheduler`."""
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def self_check(self) -> None:
        """As of `StepLoop`."""
        self.loop.self_check()

    def make_late(self, made: Callable[[], None]) -> None:
        """Nothing: the start leaves no program of a model that pools."""

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        compiles = self.runner.compiles
        return self._counters.snapshot(
            self.scheduler, 0, compiles.since_start, compiles.late, Traffic(), self.sleeper.level
        )

    @property
    def _present(self) -> int:
        """Prompts that run or wait."""
        return self.scheduler.running + self.scheduler.waiting
