"""An engine that generates: requests enter, steps run, deltas come out."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.engine.intake.pending import Pending
from jaxllm.engine.intake.queue_limit import QueueLimit
from jaxllm.engine.intake.request_factory import RequestFactory
from jaxllm.engine.intake.validation import RequestValidator, generating, validate_search
from jaxllm.engine.output.beam_requests import BeamSearchManager
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.engine_view import EngineWatch
from jaxllm.engine.output.output_processor import Ending, OutputProcessor
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.output.running_requests import RunningRequests
from jaxllm.engine.output.step_observer import StepObservers
from jaxllm.engine.runtime.late_programs import make_late
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.request import Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.sleep import Sleeper
from jaxllm.engine.startup.started import Started
from jaxllm.engine.steps.commit import Commit
from jaxllm.engine.steps.constrained import ConstrainedDraws
from jaxllm.engine.steps.generating import GeneratingSteps
from jaxllm.engine.steps.loop import StepLoop
from jaxllm.engine.transfer.transfer import NoTransfer, PageTransfer
from jaxllm.messages import EngineStats, GenerateRequest, PoolingRequest, TextDelta


class Engine:
    """Runs requests on one mesh: plan, launch, collect, commit. Not thread-safe.

    One thread calls `add`, `abort` and `step`. A step is launched while the one before it runs, and
    its tokens are collected and committed one turn later.

    Attributes:
        loop: what `step` turns.
        steps: what a turn does.
        requests: those that have entered and not ended.
        sleeper: whether the engine sleeps.
        watch: times of steps, and a map of pages.
        grammars: of choices whose output has a structure.
        transfer: both sides of exchanges with other engines.
        pending: choices that wait for a grammar or for pages.
    """

    def __init__(
        self, parts: Started, scheduler: Scheduler, seed: int, transfer: PageTransfer | None = None
    ):
        runner = parts.runner
        assert isinstance(runner, Runner), "a pooling model has an engine of its own"
        self.transfer = NoTransfer() if transfer is None else transfer
        self.resolved = parts.resolved
        self.tokenizer = parts.tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.grammars = parts.grammars
        self._counters = Counters()
        self.watch = EngineWatch(scheduler)
        self._options = LogitsOptionsReader(
            self.resolved, self.tokenizer, runner.shapes.model.processors
        )
        self._validator = RequestValidator(self.resolved, self.tokenizer, scheduler.fits)
        self._queue = QueueLimit(self.resolved)
        self._factory = RequestFactory(self.resolved, self.tokenizer, self._options, seed)
        states: dict[str, RequestState] = {}
        self._output = OutputProcessor(
            states, scheduler, parts.grammars, self._counters, self.resolved
        )
        self.pending = Pending(scheduler, parts.grammars, self.transfer, self._output.fail_choice)
        beams = BeamSearchManager(
            scheduler, self._factory.make_detokenizer, self.resolved, self._counters
        )
        self.requests = RunningRequests(beams, states)
        commit = Commit(self.requests, scheduler, self._output, self.transfer.exports)
        draws = ConstrainedDraws(runner, scheduler, parts.grammars, self._output, commit)
        self.steps = GeneratingSteps(
            runner,
            scheduler,
            parts.grammars,
            self.pending,
            self.requests,
            draws,
            self.transfer.exports,
            StepObservers(self._counters, self.watch),
        )
        self.loop = StepLoop(
            self.steps,
            commit,
            self.requests,
            runner,
            scheduler,
            self._counters,
            overlaps=self.resolved.async_scheduling,
        )
        self.sleeper = Sleeper(
            parts,
            self.pending.forget_all,
            lambda: self.has_work,
            shares_pages=transfer is not None,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.loop.has_work or self.pending.waiting > 0

    @property
    def awaits_grammar(self) -> bool:
        """Whether there is work, but none before a grammar is built or pages have come: `step`
        would wait for that."""
        return not self.loop.unsent and self.steps.is_blocked(self.loop.in_flight)

    def when_built(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a grammar is built or pages have come, in any thread."""
        self.pending.on_ready(callback)

    @property
    def wait_seconds(self) -> float:
        """How long the caller may wait for requests before `step()` without idling the device."""
        return 0.0 if self.scheduler.waiting else self.steps.arrival_wait.wait_seconds()

    def add(self, request: GenerateRequest | PoolingRequest) -> None:
        """Queue a request. Raises RequestError when it can never run or the queue is full."""
        self.enter(self.validate(request))

    def validate(self, request: GenerateRequest | PoolingRequest) -> GenerateRequest:
        """The request. Raises RequestError when it can never run here."""
        request = generating(request)
        self.sleeper.check_awake()
        request = self._validator.validate_request(request)
        self._options.validate_options(request.params, request.thinking)
        self.grammars.validate_grammar(request)
        self.pending.validate(request)
        validate_search(request, self.resolved, self.scheduler.pools)
        return request

    def queue_has_space(self, request: GenerateRequest) -> bool:
        """Whether the queue takes the request now; an idle engine takes any."""
        return self._queue.has_space(self._present, request.params.samples)

    def enter(self, request: GenerateRequest) -> None:
        """Queue a validated request. Raises RequestError when the queue is full. Whatever it
        raises, nothing is left of the request."""
        self._queue.check(self._present, request.params.samples)
        self.steps.starved = False
        self.steps.arrival_wait.request_arrived()
        state = self._factory.make_state(request)
        try:
            self.pending.add(state.choices, request)
            self.requests.add(state)
        except BaseException:
            self.requests.remove(request.id)
            for choice in state.choices:
                self.scheduler.finish(choice)
                self.grammars.release(choice)
            raise
        self._counters.prompt_tokens += len(request.prompt.tokens)

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Prompt tokens of a request that has just entered which must be computed, as known now."""
        state = self.requests.states.get(request.id)
        if state is None:
            return len(request.prompt.tokens)
        return self.scheduler.uncached_tokens(state.choices[0])

    def abort(self, request_id: str) -> None:
        """Stop a request and free its pages now; its choices end with finish_reason "abort".
        Unknown ids are ignored."""
        self.steps.starved = False
        self.loop.unsent += self.requests.beams.stop_search(request_id, "abort")
        state = self.requests.states.get(request_id)
        for choice in state.choices if state is not None else ():
            if choice.status is not Status.FINISHED:
                self.loop.unsent.append(self._output.finish_choice(choice, Ending("abort")))

    def step(self) -> list[TextDelta]:
        """As of `StepLoop`."""
        return self.loop.step()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As of `Scheduler`."""
        self.steps.starved = False
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def self_check(self) -> None:
        """As of `StepLoop`."""
        self.loop.self_check()

    def make_late(self, made: Callable[[], None]) -> None:
        """Make, in a thread, the programs that the start has left; `made` is called after each."""
        if self.runner.compiles.late[1]:
            make_late(self.runner, made)

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._counters.snapshot(
            self.scheduler,
            self.pending.waiting,
            self.runner.compiles.since_start,
            self.runner.compiles.late,
            self.runner.traffic,
            self.sleeper.level,
        )

    @property
    def _present(self) -> int:
        """Choices that run or wait."""
        return self.scheduler.running + self.scheduler.waiting + self.pending.waiting
