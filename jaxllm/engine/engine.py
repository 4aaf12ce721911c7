"""The loop: plan, launch, and while the device runs, commit the step before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial

import numpy as np
from msgspec.structs import replace

from jaxllm.background_thread import BackgroundThread
from jaxllm.config import EngineConfig
from jaxllm.engine.constraints.logits_options import LogitsOptionsReader
from jaxllm.engine.constraints.token_masks import NO_TOKEN, token_bitmask
from jaxllm.engine.constraints.validation import RequestValidator
from jaxllm.engine.output.beam_requests import BeamSearchManager, validate_search
from jaxllm.engine.output.best_of import BestOfManager, choice_seed
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.output.output_processor import OutputProcessor
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.runtime.runner import Collected, Forwarded, StepResult
from jaxllm.engine.scheduling.arrival_wait import ArrivalWait
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.prefill_budget import added_by_chunks
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.make_scheduler import make_scheduler, scheduler_class
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.start import Started, start
from jaxllm.messages import EngineStats, GenerateRequest, PromptLogprobs, RequestError, TextDelta
from jaxllm.sampling.choose import LOGPROBS, needs
from jaxllm.sampling.processor_arguments import Function

WORTH_A_CHUNK = 4  # tokens that a grammar forces
NO_MORE = TextDelta(
    id="",
    index=0,
    token_ids=[],
    text="",
    finish_reason="error",
    error="the engine lost this request",
)


class Engine:
    """Runs requests on one mesh. Not thread-safe: one thread calls `add`, `abort` and `step`."""

    def __init__(self, parts: Started, scheduler: Scheduler, seed: int):
        self.resolved, self.runner, self.tokenizer, self._grammars = (
            parts.resolved,
            parts.runner,
            parts.tokenizer,
            parts.grammars,
        )
        self.scheduler, self.eos_ids = scheduler, frozenset(parts.runner.eos_ids)
        self._live: dict[str, RequestState] = {}
        self._count = Counters()
        self._output = OutputProcessor(
            self._live, scheduler, self._grammars, self._count, self.eos_ids
        )
        self._best_of, self._beams = (
            BestOfManager(),
            BeamSearchManager(scheduler, self._detokenizer, self.eos_ids, self._count),
        )
        self._in_flight: deque[StepResult] = deque()
        self._background = BackgroundThread("forward")
        self._lookout = ArrivalWait()
        self._options = LogitsOptionsReader(
            parts.resolved.vocab_size,
            parts.tokenizer,
            parts.runner.shapes.model.processors,
            self.eos_ids,
        )
        self._validator = RequestValidator(
            parts.resolved, parts.tokenizer is not None, scheduler.fits
        )
        self._seeds = np.random.Generator(np.random.Philox(seed))
        self._pending: list[TextDelta] = []  # deltas that no step makes: rejected choices, aborts

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        report: Report | None = None,
        logits_processors: Sequence[Function] = (),
    ) -> Engine:
        """Load, compile and warm up. `logits_processors` see `sampling.processors`. Raises
        ConfigError before loading when the configuration cannot work."""
        kind = scheduler_class(config.scheduler_cls)
        parts = start(config, report or Report(), logits_processors)
        scheduler = make_scheduler(kind, config, parts.resolved, parts.runner)
        return cls(parts, scheduler, config.seed)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(
            self._in_flight or self._pending or self.scheduler.has_work or self._grammars.waiting
        )

    @property
    def awaits_grammar(self) -> bool:
        """Whether there is work, but none before a grammar is built: `step` would wait for it."""
        return self._grammars.all_building and not (
            self._in_flight or self._pending or self.scheduler.has_work
        )

    def when_built(self, heard: Callable[[], None]) -> None:
        """From now on call `heard` whenever a grammar has been built, in whatever thread did it."""
        self._grammars.on_built = heard

    @property
    def patience(self) -> float:
        """Seconds that whoever drives the engine may look out for requests before the next `step`
        without leaving the device idle."""
        return 0.0 if self.scheduler.waiting else self._lookout.wait_seconds()

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError on what can never run or when the queue is full."""
        self.check(request)
        self.enter(request)

    def enter(self, request: GenerateRequest) -> None:
        """Queue a request that `check` has passed, one `Request` per choice. Raises RequestError
        when the queue is full."""
        if not self.has_room(request):
            raise RequestError(
                f"the queue is full ({self.resolved.max_num_queued_reqs} requests); retry later",
                None,
                "queue_full",
            )
        params = request.params
        room = self.resolved.max_model_len - len(request.prompt_token_ids)
        live = RequestState()
        stops = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else self.eos_ids
        )
        seed = (
            int(self._seeds.integers(2**64, dtype=np.uint64))
            if params.seed is None
            else params.seed % 2**64
        )
        self._best_of.track(request)
        family = PromptSharing(live.choices)
        for index in range(1 if params.use_beam_search else params.samples):
            choice = Request(
                id=request.id,
                index=index,
                prompt=request.prompt_token_ids,
                params=params,
                seed=choice_seed(seed, index),
                arrival=request.arrival,
                max_tokens=min(params.max_tokens or room, room),
                cache_salt=request.cache_salt,
                needs=needs(params),
                top=params.logprobs or 0,
                asked=self._options.read_options(params),
                score_end=len(request.prompt_token_ids) - 1
                if params.prompt_logprobs is not None and index == 0
                else 0,
                stops=stops,
            )
            live.detokenizers.append(self._detokenizer(choice))
            if params.samples > 1:
                choice.sharing = family
            live.choices.append(choice)
            if request.grammar is None:
                self.scheduler.add(choice)
            else:
                self._grammars.start_build(choice, request.grammar)
        if params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1:
            live.prompt_logprobs = PromptLogprobs(top=params.prompt_logprobs, packed=b"")
        if not self._beams.start_search(live.choices[0], stops):
            self._live[request.id] = live
        self._count.prompt_tokens += len(request.prompt_token_ids)

    def uncached(self, request: GenerateRequest) -> int:
        """How many tokens of the prompt of a request that has just entered are to be computed, as
        far as one can tell now."""
        live = self._live.get(request.id)
        return (
            len(request.prompt_token_ids)
            if live is None
            else self.scheduler.kv_manager.uncached_tokens(live.choices[0])
        )

    def abort(self, request_id: str) -> None:
        """Stop a request and free its pages now; its choices end with finish_reason "abort".
        Unknown ids are ignored."""
        self._pending += self._beams.stop_search(request_id, "abort")
        live = self._live.get(request_id)
        if live is None:
            return
        for choice in list(live.choices):
            if choice.status is not Status.FINISHED:
                self._pending.append(self._output.finish_choice(choice, [], "", "abort", None))

    def step(self) -> list[TextDelta]:
        """Launch the next step, then commit the oldest in flight if there are more than the
        runner's depth. With `async_scheduling` off, commit this one.

        Whatever it raises, every request is gone afterwards and the engine is empty and usable.
        """
        try:
            return self._turn()
        except BaseException:
            self._start_over()
            raise

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; returns whether it did. While requests run it does so only
        with `reset_running_requests`, which computes them anew."""
        if self.scheduler.running:
            if not reset_running_requests:
                return False
            self.scheduler.preempt_all()
        self.scheduler.forget_prefixes()
        return True

    def self_check(self) -> None:
        """Check an engine without work: references equal page tables, each page and slot is free
        once, and only pages that hold something are findable. What is broken is counted and told by
        `stats`; the engine then starts over, and requests that it had lost end with an error."""
        self._count.self_checks += 1
        self._count.problem = ""
        try:
            self.scheduler.check()
            if self._live or self._beams:
                raise RuntimeError(
                    f"requests neither run nor wait: {sorted([*self._live, *self._beams])[:8]}"
                )
        except Exception as error:  # accounts that are broken may break what looks at them
            self._count.self_check_failures += 1
            self._count.problem = str(error) or type(error).__name__
            # Nothing that is broken may be asked for more than what clients are owed.
            owed = [
                owed
                for live in self._live.values()
                for owed in self._best_of.undelivered(live.choices)
            ]
            ends = [
                replace(NO_MORE, id=id, index=index, token_ids=[])
                for id, index in owed + self._beams.undelivered()
            ]
            self._start_over()
            self._pending += ends

    def _turn(self) -> list[TextDelta]:
        deltas, self._pending = self._pending, []
        if self._grammars.waiting:
            deltas += self._admit_guided(idle=not deltas and self.awaits_grammar)
        if self.runner.swapper is not None:
            self.scheduler.drop_lost(self.runner.swapper.lost())
        plan = self.scheduler.plan()
        if plan.moves is not None:
            self.runner.move(plan.moves)
        if not plan.empty:
            constrained = any(
                request.asked is not None and request.asked.on_host for request in plan.asking
            )
            forwarded, before = (
                self._forward_beside(plan) if constrained else (self.runner.forward(plan), [])
            )
            self._count.steps += 1
            plan.mark_started(time.time())
            if constrained:
                deltas += self._constrain(plan, before)
            self._in_flight.append(self.runner.draw(forwarded))
        depth = self.runner.depth if self.resolved.async_scheduling else 0
        margin = None
        if self._in_flight and (plan.empty or len(self._in_flight) > depth):
            launched = time.perf_counter()
            collected = self._collected()
            margin = time.perf_counter() - launched
            deltas += self._commit(collected)
        if margin is None or depth != 1 or not self._in_flight:
            self._lookout.device_idle()
        else:
            self._lookout.step_launched(
                added_by_chunks(self.runner.seconds, self.runner.shapes.buckets, plan), margin
            )
        return self._best_of.deliverable(deltas)

    def _forward_beside(self, plan: Plan) -> tuple[Forwarded, list[Collected]]:
        """Start a forward, whose launch takes a millisecond, and beside that collect the steps
        before it and begin to look for masks."""
        launching = self._background.submit(partial(self.runner.forward, plan))
        try:
            before = [self._collected() for _ in range(len(self._in_flight))]
            self._grammars.start_masks(plan.asking)
        finally:
            wait([launching])
        return launching.result(), before

    def _constrain(self, plan: Plan, before: Sequence[Collected]) -> list[TextDelta]:
        """What depends on the last tokens: while the forward runs, commit the steps before it, then
        ask each constraint."""
        deltas: list[TextDelta] = []
        for step in before:  # texts are made while the masks are found
            deltas += self._commit(step)
        jumped = {request for request in self._grammars.wait_masks() if self._jump(request, deltas)}
        running = [
            request
            for request in plan.asking
            if request.status is Status.RUNNING and request not in jumped
        ]
        going = [
            request for request in running if request.asked is not None and request.asked.restricted
        ]
        for request, why in self.runner.apply_token_bitmask(
            going, partial(token_bitmask, self._grammars)
        ):
            request.dead_end = why
        return deltas

    def _collected(self) -> Collected:
        """The oldest step in flight, its tokens told to the grammars that they follow."""
        step = self.runner.collect(self._in_flight.popleft())
        self._grammars.accept_step(step.plan.emitters, step.tokens)
        return step

    def _jump(self, request: Request, deltas: list[TextDelta]) -> bool:
        """Whether the request's grammar forced enough tokens to append them without a draw."""
        room = self.scheduler.jump_capacity(request)
        forced = self._grammars.forced_tokens(request)[:room] if room >= WORTH_A_CHUNK else []
        state = self._grammars.states.get(request)
        if state is None or len(forced) < WORTH_A_CHUNK:
            return False
        request.jumped = True
        for token in forced:
            state.accept_token(token)
            deltas.append(self._output.append_token(request, token, time.time(), None))
            if request.status is Status.FINISHED:
                return True
        self.scheduler.jump(request)
        return True

    def _admit_guided(self, idle: bool) -> list[TextDelta]:
        """Schedule the choices whose grammar is there; those of which it cannot be built end."""
        deltas: list[TextDelta] = []
        for request, failure in self._grammars.pop_built(block=idle):
            if failure is None:
                self.scheduler.add(request)
            else:
                deltas.append(
                    self._output.fail_choice(request, failure, error_param="structured_outputs")
                )
        return deltas

    def _start_over(self) -> None:
        """A step failed: pages that were planned may not have been written, and the index already
        offers them. Forget everything."""
        self._background.settle()
        self.scheduler.reset()
        for choice in [choice for live in self._live.values() for choice in live.choices]:
            self._grammars.release(choice)
        for kept in (self._live, self._beams, self._best_of, self._pending, self._in_flight):
            kept.clear()
        self.runner.reset()

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._count.snapshot(
            self.scheduler,
            self._grammars.waiting,
            self.runner.compiles.since_start,
            self.runner.traffic,
        )

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError when the request can never run here."""
        self._validator.validate_request(request)
        self._options.validate_options(request.params)
        self._grammars.validate_grammar(request)
        validate_search(request, self.resolved, self.scheduler.pools, self.eos_ids)

    def has_room(self, request: GenerateRequest) -> bool:
        """Whether it may join what runs and waits; an idle engine takes any request."""
        there = self.scheduler.running + self.scheduler.waiting + self._grammars.waiting
        return (
            there == 0
            or there + request.params.samples
            <= self.resolved.max_num_seqs + self.resolved.max_num_queued_reqs
        )

    def _detokenizer(self, choice: Request) -> Detokenizer | None:
        if self.tokenizer is None or not choice.params.detokenize:
            return None
        return Detokenizer(self.tokenizer.backend, choice.prompt, choice.params)

    def _commit(self, step: Collected) -> list[TextDelta]:
        """Append a finished step's tokens to their requests and find out who has ended."""
        deltas: list[TextDelta] = []
        now = time.time()
        for span, scores in step.scores:
            if span.request.status is not Status.FINISHED:
                self._live[span.request.id].add_prompt_logprobs(span, scores)
        for row, (request, token) in enumerate(zip(step.plan.emitters, step.tokens, strict=True)):
            if request is None or request.status is Status.FINISHED:
                continue
            if request.jumped:
                request.jumped = False
                continue
            if request.dead_end is not None:
                deltas.append(self._output.end_without_token(request, request.dead_end))
                continue
            # What a function on the host leaves says nothing about the model
            if token < 0 and row not in step.failures:
                self.scheduler.invalidate(request)
            if request.is_beam:
                top = (
                    step.logprobs.top(row, request.top)
                    if step.logprobs is not None and token >= 0
                    else None
                )
                deltas += (
                    self._beams.add_top_tokens(request, top, now)
                    if top
                    else self._beams.stop_search(request.id, "error", NO_TOKEN)
                )
                continue
            if token < 0:
                deltas.append(self._output.fail_choice(request, step.failures.get(row, NO_TOKEN)))
                continue
            logprobs = None
            if step.logprobs is not None and request.needs & LOGPROBS:
                logprobs = step.logprobs.row(row, request.top)
            deltas.append(self._output.append_token(request, token, now, logprobs))
        return deltas
