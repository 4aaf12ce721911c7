"""The loop: plan and launch a step, then collect and commit the one before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial

from jaxllm.background.thread import BackgroundThread
from jaxllm.engine.constraints.token_masks import NO_TOKEN, token_bitmask
from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.engine.intake.pending import Pending
from jaxllm.engine.intake.request_factory import RequestFactory
from jaxllm.engine.intake.validation import RequestValidator, generating, validate_search
from jaxllm.engine.output.beam_requests import BeamSearchManager
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.delivery import Holder, deliverable, holder
from jaxllm.engine.output.engine_view import EngineWatch
from jaxllm.engine.output.output_processor import OutputProcessor, lost_choice
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.runtime.runner import Collected, Forwarded, Runner, StepResult
from jaxllm.engine.scheduling.arrival_wait import ArrivalWait
from jaxllm.engine.scheduling.chunk_planner import added_by_chunks
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.sleep import Sleep
from jaxllm.engine.startup.start import Started
from jaxllm.engine.transfer.transfer import NoTransfer, PageTransfer
from jaxllm.messages import EngineStats, GenerateRequest, PoolingRequest, RequestError, TextDelta
from jaxllm.sampling.choose import LOGPROBS

MIN_JUMP = 4  # tokens that a grammar forces; fewer are not worth a chunk


class Engine:
    """Runs requests on one mesh: plan, launch, collect, commit. Not thread-safe.

    One thread calls `add`, `abort` and `step`. A step is launched while the one before it runs, and
    its tokens are collected and committed one turn later.
    """

    def __init__(
        self, parts: Started, scheduler: Scheduler, seed: int, transfer: PageTransfer | None = None
    ):
        assert isinstance(parts.runner, Runner), "a pooling model has an engine of its own"
        self.resolved, self.tokenizer = parts.resolved, parts.tokenizer
        self.runner, self.scheduler, self._grammars = parts.runner, scheduler, parts.grammars
        pages = NoTransfer() if transfer is None else transfer
        self._pending = Pending(scheduler, parts.grammars, pages)
        self._exports = pages.exports
        forget, busy = self._pending.forget_all, lambda: self.has_work
        self.sleeper = Sleep(parts, forget, busy, shares_pages=transfer is not None)
        self.eos_ids = frozenset(parts.runner.eos_ids)
        self._options = LogitsOptionsReader(
            self.resolved.vocab_size,
            self.tokenizer,
            parts.runner.shapes.model.processors,
            self.eos_ids,
        )
        self._validator = RequestValidator(self.resolved, self.tokenizer, scheduler.fits)
        self._factory = RequestFactory(
            self.resolved, self.tokenizer, self._options, self.eos_ids, seed
        )
        self._states: dict[str, RequestState] = {}  # of running requests that are no beam searches
        self._counters, self.watch = Counters(), EngineWatch(scheduler)
        self._output = OutputProcessor(
            self._states, scheduler, self._grammars, self._counters, self.eos_ids
        )
        self._holders: dict[str, Holder] = {}  # of running requests whose deltas are held back
        self._beams = BeamSearchManager(
            scheduler, self._factory.make_detokenizer, self.eos_ids, self._counters
        )
        self._in_flight: deque[StepResult] = deque()
        self._background = BackgroundThread("forward")
        self._arrival_wait = ArrivalWait()
        self._unsent: list[TextDelta] = []  # made outside of steps: lost choices, aborts
        # Whether the last step did nothing, and nothing was added or taken away since
        self._starved = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self._in_flight or self._unsent or self.scheduler.has_work or self._pending.waiting
        )

    @property
    def awaits_grammar(self) -> bool:
        """Whether there is work, but none before a grammar is built or pages have come: `step`
        would wait for that."""
        return self._pending.blocked and not (
            self._in_flight or self._unsent or (self.scheduler.has_work and not self._starved)
        )

    def when_built(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a grammar is built or pages have come, in any thread."""
        self._pending.on_ready(callback)

    @property
    def wait_seconds(self) -> float:
        """How long the caller may wait for requests before `step()` without idling the device."""
        return 0.0 if self.scheduler.waiting else self._arrival_wait.wait_seconds()

    def add(self, request: GenerateRequest | PoolingRequest) -> None:
        """Queue a request. Raises RequestError when it can never run or the queue is full."""
        self.enter(self.validate(request))

    def validate(self, request: GenerateRequest | PoolingRequest) -> GenerateRequest:
        """The request. Raises RequestError when it can never run here."""
        request = generating(request)
        self.sleeper.check_awake()
        request = self._validator.validate_request(request)
        self._options.validate_options(request.params, request.thinking)
        self._grammars.validate_grammar(request)
        self._pending.validate(request)
        validate_search(request, self.resolved, self.scheduler.pools, self.eos_ids)
        return request

    def queue_has_space(self, request: GenerateRequest) -> bool:
        """Whether the queue takes the request now; an idle engine takes any."""
        present = self.scheduler.running + self.scheduler.waiting + self._pending.waiting
        limit = self.resolved.max_num_seqs + self.resolved.max_num_queued_reqs
        return present == 0 or present + request.params.samples <= limit

    def enter(self, request: GenerateRequest) -> None:
        """Queue a validated request. Raises RequestError when the queue is full. Whatever it
        raises, nothing is left of the request."""
        if not self.queue_has_space(request):
            limit = self.resolved.max_num_queued_reqs
            message = f"the queue is full ({limit} requests); retry later"
            raise RequestError(message, None, "queue_full")
        self._starved = False
        self._arrival_wait.request_arrived()
        state = self._factory.make_state(request)
        try:
            self._pending.add(state.choices, request)
            if not self._beams.start_search(state.choices[0], state.choices[0].stops):
                if (holds := holder(request.params)) is not None:
                    self._holders[request.id] = holds
                self._states[request.id] = state
        except BaseException:
            self._beams.stop_search(request.id, "error")
            self._holders.pop(request.id, None)
            for choice in state.choices:
                self.scheduler.finish(choice)
                self._grammars.release(choice)
            raise
        self._counters.prompt_tokens += len(request.prompt_token_ids)

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Prompt tokens of a request that has just entered which must be computed, as known now."""
        state = self._states.get(request.id)
        if state is None:
            return len(request.prompt_token_ids)
        return self.scheduler.kv_manager.uncached_tokens(state.choices[0])

    def abort(self, request_id: str) -> None:
        """Stop a request and free its pages now; its choices end with finish_reason "abort".
        Unknown ids are ignored."""
        self._starved = False
        self._unsent += self._beams.stop_search(request_id, "abort")
        state = self._states.get(request_id)
        for choice in state.choices if state is not None else ():
            if choice.status is not Status.FINISHED:
                self._unsent.append(self._output.finish_choice(choice, [], "", "abort", None))

    def step(self) -> list[TextDelta]:
        """Launch the next step, then collect and commit the oldest in flight, if more of its group
        are than the runner's depth. Without `async_scheduling`, that is the one just launched.

        Whatever it raises, every request is gone afterwards and the engine is empty and usable.
        """
        try:
            with self.runner.compiles:
                deltas = self._run_step()
            deltas = self._exports.settle(deltas)
            self.scheduler.kv_manager.flush_events()
            return deltas
        except BaseException:
            self._start_over()
            raise

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As of `Scheduler`."""
        self._starved = False
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def self_check(self) -> None:
        """Check an idle engine: references equal page tables, each page and slot is free once, and
        only pages with contents can be found.

        A problem is counted and shown by `stats`. The engine then starts over, and requests that it
        had lost end with an error.
        """
        self._counters.self_checks += 1
        self._counters.problem = ""
        try:
            self.scheduler.check()
            if self._states or self._beams.open:
                lost = sorted([*self._states, *self._beams.open])[:8]
                raise RuntimeError(f"requests neither run nor wait: {lost}")
        except Exception as error:  # broken accounts may break the check itself
            self._counters.self_check_failures += 1
            self._counters.problem = str(error) or type(error).__name__
            # Read nothing of the broken state but what clients still wait for
            undelivered = self._beams.undelivered()
            for state in self._states.values():
                undelivered += state.undelivered()
            self._start_over()
            self._unsent += [lost_choice(id, index) for id, index in undelivered]

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        compiles, traffic = self.runner.compiles.since_start, self.runner.traffic
        return self._counters.snapshot(
            self.scheduler, self._pending.waiting, compiles, traffic, self.sleeper.level
        )

    # --- one step

    def _run_step(self) -> list[TextDelta]:
        deltas, self._unsent = self._unsent, []
        if self._pending.unsettled:
            blocks = not deltas and self.awaits_grammar
            for choice, error in self._pending.schedule_ready(blocks):
                deltas.append(self._output.fail_choice(choice, error, "structured_outputs"))
        plan = self._plan()
        if not plan.empty:
            deltas += self._launch(plan)
        depth = self.runner.depth if self.resolved.async_scheduling else 0
        margin = None
        while self._in_flight and (
            plan.empty or sum(step.group == plan.group for step in self._in_flight) > depth
        ):
            launched = time.perf_counter()
            step = self._collect()
            margin = time.perf_counter() - launched
            deltas += self._commit(step)
            if plan.empty:
                break
        if margin is None or depth != 1 or not self._in_flight:
            self._arrival_wait.device_idle()
        else:
            added = added_by_chunks(self.runner.seconds, self.runner.shapes.buckets, plan)
            self._arrival_wait.step_launched(added, margin)
        return deliverable(self._holders, deltas)

    def _plan(self) -> Plan:
        """The next step. Its transfers between pool and host memory are started."""
        if lost := self.runner.lost():
            self.scheduler.drop_lost(lost)
        plan = self.scheduler.plan()
        if plan.moves is not None:
            self.runner.move(plan.moves)
        self._starved = plan.empty and plan.moves is None and not self._in_flight
        return plan

    def _launch(self, plan: Plan) -> list[TextDelta]:
        """Start the forward and the draw of a step.

        Where a draw depends on the tokens before it, the steps in flight are committed between the
        two, while the forward runs; their deltas are returned.
        """
        constrained = any(
            request.logits_options is not None and request.logits_options.on_host
            for request in plan.processed_requests
        )
        forwarded, before = (
            self._forward_and_collect(plan) if constrained else (self.runner.forward(plan), [])
        )
        self._exports.take(plan.chunks)
        self._counters.count_step(plan.tokens)
        self.watch.step_launched()
        plan.mark_started(time.time())
        deltas = self._constrain(plan, before) if constrained else []
        self._in_flight.append(self.runner.draw(forwarded))
        deltas += map(self._output.answer, self._exports.answers(plan.chunks))
        return deltas

    def _collect(self) -> Collected:
        """Wait for the oldest step in flight. Grammars follow its tokens."""
        step = self.runner.collect(self._in_flight.popleft())
        self.watch.step_collected(step.plan)
        self._grammars.accept_step(step.plan.emitters, step.tokens)
        return step

    def _commit(self, step: Collected) -> list[TextDelta]:
        """Append a step's tokens to their requests, and end those that are complete."""
        deltas: list[TextDelta] = []
        now = time.time()
        self._exports.export(step.plan.chunks)
        for span, scores in step.scores:
            if span.request.status is not Status.FINISHED:
                self._states[span.request.id].add_prompt_logprobs(span, scores)
        for row, (request, token) in enumerate(zip(step.plan.emitters, step.tokens, strict=True)):
            if request is None or request.status is Status.FINISHED:
                continue
            if request.jumped:
                request.jumped = False
                continue
            if request.dead_end is not None:
                deltas.append(self._output.end_without_token(request, request.dead_end))
                continue
            # Logits that a host function changed tell nothing about the KV
            if token < 0 and row not in step.failures:
                self.scheduler.invalidate(request)
                self._exports.forget(request.hashes)
            if request.is_beam:
                deltas += self._commit_beam(step, row, request, now)
                continue
            if token < 0:
                deltas.append(self._output.fail_choice(request, step.failures.get(row, NO_TOKEN)))
                continue
            logprobs = None
            if step.logprobs is not None and request.needs & LOGPROBS:
                logprobs = step.logprobs.row(row, request.top)
            deltas.append(self._output.append_token(request, token, now, logprobs))
        return deltas

    def _commit_beam(
        self, step: Collected, row: int, request: Request, now: float
    ) -> list[TextDelta]:
        """Give a beam's most likely next tokens to its search."""
        if step.logprobs is None or step.tokens[row] < 0:
            return self._beams.stop_search(request.id, "error", NO_TOKEN)
        return self._beams.add_top_tokens(request, step.logprobs.top(row, request.top), now)

    # --- constrained draws

    def _forward_and_collect(self, plan: Plan) -> tuple[Forwarded, list[Collected]]:
        """Launch a forward in a thread, which takes a millisecond. Beside it, collect the steps in
        flight and start the token masks."""

        def launch() -> Forwarded:
            with self.runner.compiles:
                return self.runner.forward(plan)

        launching = self._background.submit(launch)
        try:
            before = [self._collect() for _ in range(len(self._in_flight))]
            self._grammars.start_masks(plan.processed_requests)
        finally:
            wait([launching])
        return launching.result(), before

    def _constrain(self, plan: Plan, before: Sequence[Collected]) -> list[TextDelta]:
        """Commit the steps before a draw, then set the masks of the requests that draw."""
        # Texts are made while the masks are computed
        deltas = [delta for step in before for delta in self._commit(step)]
        jumped = {request for request in self._grammars.wait_masks() if self._jump(request, deltas)}
        restricted = [
            request
            for request in plan.processed_requests
            if request.status is Status.RUNNING
            and request not in jumped
            and request.logits_options is not None
            and request.logits_options.restricted
        ]
        masks = partial(token_bitmask, self._grammars)
        for request, reason in self.runner.apply_token_bitmask(restricted, masks):
            request.dead_end = reason
        return deltas

    def _jump(self, request: Request, deltas: list[TextDelta]) -> bool:
        """Append the tokens that the request's grammar forces, without a draw. False when there are
        too few."""
        capacity = self.scheduler.jump_capacity(request)
        forced = self._grammars.forced_tokens(request)[:capacity] if capacity >= MIN_JUMP else []
        state = self._grammars.states.get(request)
        if state is None or len(forced) < MIN_JUMP:
            return False
        request.jumped = True
        for token in forced:
            state.accept_token(token)
            deltas.append(self._output.append_token(request, token, time.time(), None))
            if request.status is Status.FINISHED:
                return True
        self.scheduler.jump(request)
        return True

    def _start_over(self) -> None:
        """Forget every request and prefix after a failure: pages that were planned may not have
        been written, and the index already offers them."""
        self._background.settle()
        self._pending.forget_all()
        for choice in [choice for state in self._states.values() for choice in state.choices]:
            self._grammars.release(choice)
        steps = self._in_flight, self.watch
        for kept in (self._states, self._beams.open, self._holders, self._unsent, *steps):
            kept.clear()
        self.runner.reset()
