"""The HTTP process's side of the engine: requests go in, streams of deltas come out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxllm.commands import Sleep, UpdateWeights, WakeUp
from jaxllm.config import EngineConfig, Resolved
from jaxllm.messages import EngineStats, EngineView, GenerateRequest, PoolingRequest, TextDelta
from jaxllm.server.engine.connection import EngineConnection
from jaxllm.server.engine.progress import StartProgress
from jaxllm.server.engine.routing import CachedPages
from jaxllm.server.engine.streams import InFlight, Observer, Stream
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Command,
    Died,
    Inspect,
    Inspected,
    Outputs,
    Phase,
    Pool,
    Ready,
    Rejected,
    Start,
    StepFailed,
    Stop,
    ToEngine,
    ToServer,
)
from jaxllm.server.errors import ApiError, bad_request, overloaded, sanitize, server_error

SEND_BURST = 1 << 18  # bytes sent to the engine before other tasks of the event loop run
BUSY_CODES = ("queue_full", "overloaded", "sleeping")
MAX_RETRY_AFTER = 60  # seconds

logger = logging.getLogger("jaxllm.server")


class EngineClient:
    """Everything here runs on the event loop's thread; nothing blocks.

    Attributes:
        stats: the engine's latest snapshot.
        last_message: time.monotonic of the latest message.
        choices: choices in flight, including those not yet sent to the engine.
        progress: how far the current or the last start is.
        restarting: whether another engine process is being started.
        given_up: whether none will be started any more.
        waiting_tokens: tokens of prompts without a first output.
        load: tokens of requests in flight, prompts and answers.
        cached: what the engine's prefix cache holds, if it tells.
        hash_start: where the hashes of `cached` start; None: nothing is cached or told.
    """

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer | None = None,
        tells_prefixes: bool = False,
    ):
        self._config = config
        self._tells_prefixes = tells_prefixes
        self.progress = StartProgress()
        self.observer = observer or Observer()
        self._connection: EngineConnection | None = None
        self._resolved: Resolved | None = None
        self._start_seconds = 1.0  # of the latest start
        self._in_flight: dict[str, InFlight] = {}
        self._unsent: deque[InFlight] = deque()
        self._send_scheduled = False  # `send_waiting` runs again in the loop's next turn
        self._choices_sent = 0
        self._commands: deque[asyncio.Future[str | None]] = deque()  # answers due, in order
        self._weights: UpdateWeights | None = None  # that the engine has taken
        self._sleep: Sleep | None = None  # that it was put to, until it wakes
        self._inspections: deque[asyncio.Future[EngineView]] = deque()  # likewise
        self.stats = EngineStats()
        self.last_message = time.monotonic()
        self._reads = 0  # of the engine's socket
        self._behind = False  # several messages came with the latest
        self.choices = 0
        self.waiting_tokens = 0
        self.load = 0
        self.cached = CachedPages()
        self.hash_start: bytes | None = None
        self.restarting = self.given_up = False

    async def connect(self, sock: socket.socket, process_id: int | None = None) -> None:
        """Start the engine at the other end and wait until it takes requests; callable again
        after its death. Raises EngineDied."""
        config = self._config
        began = time.monotonic()
        self.progress = StartProgress()
        if self._resolved is not None:  # requests are checked against the first engine's context
            config = dataclasses.replace(config, max_model_len=self._resolved.max_model_len)
        self._connection = EngineConnection(self._receive, self._lost, process_id)
        ready = await self._connection.start(sock, Start(config, self._tells_prefixes))
        self._resolved = ready.resolved
        self.hash_start = ready.hash_start
        self._start_seconds = time.monotonic() - began

    @property
    def resolved(self) -> Resolved:
        """The engine's resolved configuration; only after `connect`."""
        assert self._resolved is not None
        return self._resolved

    @property
    def died(self) -> asyncio.Future[Died]:
        """Resolves when the current engine process ends; only after `connect` has begun."""
        assert self._connection is not None
        return self._connection.died

    @property
    def alive(self) -> bool:
        """Whether an engine process takes requests."""
        return self._connection is not None and self._connection.alive

    @property
    def in_flight(self) -> int:
        """Engine requests that have not ended."""
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        """Choices that the engine runs and queues at most."""
        return self.resolved.max_num_seqs + self.resolved.max_num_queued_reqs

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens would run at once, as far as seats and pages go."""
        resolved = self.resolved
        free = resolved.num_pages * resolved.page_size - self.load
        return self.choices < resolved.max_num_seqs and tokens <= free

    def seconds_without_step(self) -> float:
        """Seconds since the last message although requests are in flight; 0 when idle."""
        if not self._in_flight:
            return 0.0
        oldest = next(iter(self._in_flight.values())).submitted
        return time.monotonic() - max(self.last_message, oldest)

    def take(self, request: GenerateRequest | PoolingRequest, stream: Stream, number: int) -> None:
        """Take prompt `number` of an HTTP request, whose deltas go into its stream; `send_waiting`
        sends it."""
        tokens = len(request.prompt.tokens)
        entry = InFlight(
            request, stream, number, request.params.n, time.monotonic(), tokens, tokens
        )
        self.waiting_tokens += tokens
        self.load += tokens
        self._in_flight[request.id] = entry
        stream.ids.add(request.id)
        self.choices += entry.engine_choices
        self._unsent.append(entry)
        self.observer.submitted(entry)

    def check_alive(self) -> None:
        """Raise ApiError when no engine runs."""
        if not self.alive:
            seconds = min(math.ceil(self._start_seconds), MAX_RETRY_AFTER)
            state = "restarting" if self.restarting else "not running"
            raise overloaded(
                f"the engine is {state}; try again later", "engine_down", retry_after=seconds
            )

    def send_waiting(self) -> None:
        """Send requests within `capacity`; the rest follows as choices end, or in the loop's next
        turn after a large burst."""
        burst = 0
        while self._unsent and not self._send_scheduled:
            entry = self._unsent[0]
            if entry.request.id in self._in_flight:
                if self._choices_sent and self._choices_sent + entry.engine_choices > self.capacity:
                    return
                entry.sent = True
                self._choices_sent += entry.engine_choices
                burst += self._send(_starting(entry.request))
            self._unsent.popleft()
            if burst > SEND_BURST:
                self._send_scheduled = True
                asyncio.get_running_loop().call_soon(self._send_more)

    def _send_more(self) -> None:
        self._send_scheduled = False
        self.send_waiting()

    def abort(self, stream: Stream) -> None:
        """Abort what is in flight here of one HTTP request."""
        for id in [id for id in stream.ids if id in self._in_flight]:
            entry = self._forget(id)
            self.observer.aborted(entry)
            if entry.sent:
                self._send(Abort(id))
        self.send_waiting()

    def fail_all(self, make: Callable[[], ApiError], sent_only: bool = False) -> None:
        """End every request, or those sent to the engine, with an error of its own."""
        # Listed first: as these end, others are sent
        entries = [entry for entry in self._in_flight.values() if entry.sent or not sent_only]
        for entry in entries:
            entry.stream.fail(make())

    async def run_command(self, command: Command) -> None:
        """Have the engine process carry out a command. Raises ApiError when it cannot."""
        self.check_alive()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._commands.append(answer)
        self._send(command)
        if problem := await answer:
            raise bad_request(sanitize(problem))
        match command:
            case UpdateWeights():
                # other weights wake it
                self._weights = command
                self._sleep = None
            case Sleep(level) if self._sleep is None or level > self._sleep.level:
                self._sleep = command
            case WakeUp():
                self._sleep = None

    def _become_as_before(self) -> None:
        """Have an engine process that has just started take the weights that the one before had,
        and sleep if that slept, before any request reaches it; it ends when it cannot."""
        if self._weights is not None:
            self._repeat(self._weights, f"take the weights of {self._weights.directory} again")
        if self._sleep is not None:
            self._repeat(self._sleep, "sleep again")

    def _repeat(self, command: Command, aim: str) -> None:
        connection = self._connection
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def heard(answer: asyncio.Future[str | None]) -> None:
            problem = answer.exception() or answer.result()
            if problem is not None and connection is not None:
                connection.end(Died(f"cannot {aim}: {problem}"))

        answer.add_done_callback(heard)
        self._commands.append(answer)
        self._send(command)

    def inspect(self) -> asyncio.Future[EngineView]:
        """What the engine does now, in detail; it answers between two steps. The future, or this
        call, raises ApiError when no engine runs."""
        self.check_alive()
        view: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._inspections.append(view)
        self._send(Inspect())
        return view

    def stop(self) -> None:
        """Tell the engine process to end."""
        self._send(Stop())
        if self._connection is not None:
            self._connection.hang_up()

    def _send(self, message: ToEngine) -> int:
        if self._connection is None:
            return 0
        return self._connection.send(message)

    def _receive(self, messages: list[ToServer]) -> None:
        self.last_message = time.monotonic()
        self._reads += 1
        self._behind = len(messages) > 1
        for message in messages:
            self._handle(message)

    def _handle(self, message: ToServer) -> None:
        assert self._connection is not None
        match message:
            case Outputs(deltas, stats, prefixes):
                if prefixes:
                    self.cached.follow(prefixes)
                if stats.self_checks != self.stats.self_checks:
                    log_self_check(stats)
                self.stats = stats
                for delta in deltas:
                    self._delta(delta)
            case Rejected():
                self._rejected(message)
            case StepFailed():
                self.observer.step_failed()
                failed = "the engine failed while it ran this request; send it again"
                self.fail_all(lambda: server_error(failed), sent_only=True)
            case Phase():
                self.progress.hear(message)
            case Answered(error):
                answer = self._commands.popleft()
                if not answer.done():  # its client has gone
                    answer.set_result(error)
            case Inspected(view):
                inspection = self._inspections.popleft()
                if not inspection.done():
                    inspection.set_result(view)
            case Ready():
                self.stats = message.stats
                self._become_as_before()
                self._connection.ready.set_result(message)
            case Died():
                self._connection.end(message)

    def _delta(self, delta: TextDelta) -> None:
        entry = self._in_flight.get(delta.id)
        if entry is None:  # aborted meanwhile
            return
        if entry.waiting_tokens:
            self._begun(entry)
        self.observer.delta(entry, delta, self.last_message)
        tokens = len(delta.token_ids)
        entry.load += tokens
        self.load += tokens
        if delta.finish_reason is not None:
            entry.open_choices -= 1
            self.choices -= 1
            self._choices_sent -= 1
            if entry.open_choices == 0:
                self._forget(delta.id)
        if delta.finish_reason == "error":
            reason = sanitize(delta.error or "the engine failed on this request")
            field = entry.stream.field_names.get(delta.error_param or "", delta.error_param)
            if field is None:
                entry.stream.fail(server_error(reason))
            else:
                entry.stream.fail(bad_request(reason, field, "unsatisfiable"))
        else:
            entry.stream.push(entry.prompt, delta, self._reads, self._behind)
        self.send_waiting()

    def _rejected(self, message: Rejected) -> None:
        entry = self._in_flight.get(message.id)
        if entry is None:
            return
        reason = sanitize(message.message)
        if message.code in BUSY_CODES:
            error = overloaded(reason, message.code)
        elif message.code == "internal_error":
            error = server_error()
        else:
            error = bad_request(reason, message.param, message.code)
        self._forget(message.id)
        entry.stream.fail(error)

    def _forget(self, id: str) -> InFlight:
        entry = self._in_flight.pop(id)
        entry.stream.ids.discard(id)
        self._begun(entry)
        self.load -= entry.load
        self.choices -= entry.engine_choices
        self._choices_sent -= entry.engine_choices if entry.sent else 0
        return entry

    def _begun(self, entry: InFlight) -> None:
        """Its prompt waits no longer."""
        self.waiting_tokens -= entry.waiting_tokens
        entry.waiting_tokens = 0

    def _lost(self) -> None:
        """The engine process is gone, and with it every request and every counter."""
        self.stats = EngineStats()
        self.cached.clear()
        self.fail_all(lambda: server_error("the engine stopped working; send the request again"))
        due: list[asyncio.Future[Any]] = [*self._commands, *self._inspections]
        for answer in due:
            if not answer.done():
                answer.set_exception(server_error("the engine stopped working; try again later"))
        self._commands.clear()
        self._inspections.clear()


def _starting(request: GenerateRequest | PoolingRequest) -> Add | Pool:
    if isinstance(request, PoolingRequest):
        return Pool(request)
    return Add(request)


def log_self_check(stats: EngineStats) -> None:
    """Log the outcome of the engine's latest self-check."""
    if stats.self_check_problem:
        logger.error(
            "self-check %d found a broken engine, which started over: %s",
            stats.self_checks,
            stats.self_check_problem,
        )
    else:
        logger.info(
            "self-check %d: pages, slots and cached prefixes are in order", stats.self_checks
        )
