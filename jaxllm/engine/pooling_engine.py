"""The loop of a pooling model: plan and launch a step, then collect the one before and give its
vectors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxllm.engine.intake.validation import check_prompt
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.engine_view import EngineWatch
from jaxllm.engine.runtime.pooling_runner import PooledStep, PoolingRunner
from jaxllm.engine.scheduling.plan import Traffic
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.sleep import Sleep
from jaxllm.engine.startup.start import Started
from jaxllm.messages import EngineStats, GenerateRequest, PoolingRequest, RequestError, TextDelta

NOT_FINITE = "the model's result is not finite; its weights overflow in this dtype (--dtype)"


class PoolingEngine:
    """Runs prompts on one mesh, each to one vector. Not thread-safe.

    The calls are those of `Engine`: a front end drives either. A prompt is a request that ends
    with its last chunk; order, chunks, pages and shared prefixes are the scheduler's.
    """

    awaits_grammar = False  # as of `Engine`

    def __init__(self, parts: Started, scheduler: Scheduler):
        assert isinstance(parts.runner, PoolingRunner)
        self.resolved, self.tokenizer = parts.resolved, parts.tokenizer
        self.runner, self.scheduler = parts.runner, scheduler
        self.sleeper = Sleep(parts, scheduler.reset, lambda: self.has_work)
        self.watch = EngineWatch(scheduler)
        self._requests: dict[str, Request] = {}
        self._counters = Counters()
        self._in_flight: deque[PooledStep] = deque()
        self._pending: list[TextDelta] = []  # made outside of steps

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight or self._pending or self.scheduler.has_work)

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
        if isinstance(request, GenerateRequest):
            raise RequestError(
                "this model pools and generates nothing; ask for embeddings, classes or scores",
                None,
                "wrong_runner",
            )
        self.sleeper.check_awake()
        check_prompt(request, self.resolved, self.resolved.max_model_len)
        if not self.scheduler.fits(len(request.prompt_token_ids)):
            raise RequestError(
                f"a prompt of {len(request.prompt_token_ids)} tokens can never fit the KV pool; "
                "shorten it",
                "prompt",
                "kv_pool_too_small",
            )
        return request

    def queue_has_space(self, request: PoolingRequest) -> bool:
        """Whether the queue takes the request now; an idle engine takes any."""
        present = self.scheduler.running + self.scheduler.waiting
        limit = self.resolved.max_num_seqs + self.resolved.max_num_queued_reqs
        return present == 0 or present < limit

    def enter(self, request: PoolingRequest) -> None:
        """Queue a validated request. Raises RequestError when the queue is full."""
        if not self.queue_has_space(request):
            limit = self.resolved.max_num_queued_reqs
            message = f"the queue is full ({limit} requests); retry later"
            raise RequestError(message, None, "queue_full")
        prompt = Request(
            id=request.id,
            index=0,
            prompt=request.prompt_token_ids,
            params=request.params,
            seed=0,
            arrival=request.arrival,
            max_tokens=1,
            cache_salt=request.cache_salt,
            second_text=request.second_text,
        )
        self.scheduler.add(prompt)
        self._requests[request.id] = prompt
        self._counters.prompt_tokens += len(prompt.prompt)

    def uncached_tokens(self, request: PoolingRequest) -> int:
        """Prompt tokens of a request that has just entered which must be computed, as known now."""
        return self.scheduler.kv_manager.uncached_tokens(self._requests[request.id])

    def abort(self, request_id: str) -> None:
        """Stop a request and free its pages now. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._pending.append(self._finish(request, "abort"))

    def step(self) -> list[TextDelta]:
        """Launch the next step, then collect the oldest in flight, if more than the runner's depth
        are.

        Whatever it raises, every request is gone afterwards and the engine is empty and usable.
        """
        try:
            with self.runner.compiles:
                deltas = self._run_step()
            self.scheduler.kv_manager.flush_events()
            return deltas
        except BaseException:
            self._start_over()
            raise

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As of `Scheduler`."""
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def self_check(self) -> None:
        """Check an idle engine, as `Engine` does."""
        self._counters.self_checks += 1
        self._counters.problem = ""
        try:
            self.scheduler.check()
            if self._requests:
                raise RuntimeError(f"requests neither run nor wait: {sorted(self._requests)[:8]}")
        except Exception as error:  # broken accounts may break the check itself
            self._counters.self_check_failures += 1
            self._counters.problem = str(error) or type(error).__name__
            lost, reason = list(self._requests.values()), "the engine lost this request"
            self._start_over()
            self._pending += [_ended(request, "error", reason) for request in lost]

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        compiles = self.runner.compiles.since_start
        return self._counters.snapshot(self.scheduler, 0, compiles, Traffic(), self.sleeper.level)

    def _run_step(self) -> list[TextDelta]:
        deltas, self._pending = self._pending, []
        plan = self.scheduler.plan()
        if not plan.empty:
            self._counters.count_step(plan.tokens)
            self.watch.step_launched()
            plan.mark_started(time.time())
            self._in_flight.append(self.runner.launch(plan))
        depth = self.runner.depth if self.resolved.async_scheduling else 0
        if self._in_flight and (plan.empty or len(self._in_flight) > depth):
            deltas += self._collect(self._in_flight.popleft())
        return deltas

    def _collect(self, step: PooledStep) -> list[TextDelta]:
        """Wait for a step, and end the requests whose prompts are complete."""
        vectors, now = self.runner.collect(step), time.time()
        self.watch.step_collected(step.plan)
        deltas = []
        for chunk, vector in zip(step.plan.chunks, vectors, strict=True):
            request = chunk.request
            if not chunk.final or request.status is Status.FINISHED:
                continue
            request.first_token_at = request.last_token_at = now
            if np.isfinite(vector).all():
                deltas.append(self._finish(request, "stop", pooled=vector.tobytes()))
            else:
                self.scheduler.invalidate(request)
                deltas.append(self._finish(request, "error", NOT_FINITE))
        return deltas

    def _finish(
        self, request: Request, reason: str, error: str | None = None, pooled: bytes | None = None
    ) -> TextDelta:
        """The end of a request; frees its pages and slot."""
        self.scheduler.finish(request)
        del self._requests[request.id]
        return _ended(request, reason, error, pooled)

    def _start_over(self) -> None:
        """Forget every request and prefix after a failure."""
        self.scheduler.reset()
        for kept in (self._requests, self._in_flight, self._pending, self.watch):
            kept.clear()
        self.runner.reset()


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
