"""The HTTP process's side of the socket to the engine process: requests go in, streams of deltas
come out."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jaxllm.config import EngineConfig, Resolved
from jaxllm.messages import EngineStats, GenerateRequest, TextDelta
from jaxllm.server.engine.wire import (
    Abort,
    Add,
    Answered,
    Died,
    Outputs,
    Phase,
    Profile,
    Ready,
    Rejected,
    ResetPrefixes,
    Start,
    Stop,
    ToEngine,
    ToServer,
    encode,
    to_server,
)
from jaxllm.server.errors import ApiError, bad_request, overloaded, sanitize, server_error

ENGINE_COMMAND = (sys.executable, "-m", "jaxllm.server.engine.process")
# Tokens and logprob entries that may come while a client does not take what it is sent
MAX_BACKLOG = 1 << 17
# Bytes of requests that are given to the engine process before others on the event loop have their
# turn
PASS_ON = 1 << 18
BYTES_OF_ENTRY = 8  # a token's id or rank, and its log-probability
BUSY_CODES = ("queue_full", "overloaded")

logger = logging.getLogger("jaxllm.server")


class Observer(Protocol):
    """Hears of every delta and of every request's end (metrics)."""

    def delta(self, entry: Entry, delta: TextDelta, now: float) -> None: ...
    def aborted(self, entry: Entry) -> None: ...


class NullObserver:
    """An observer that notes nothing."""

    def delta(self, entry: Entry, delta: TextDelta, now: float) -> None: ...
    def aborted(self, entry: Entry) -> None: ...


@dataclass(slots=True)
class Entry:
    """One engine request in flight: prompt number `prompt` of one HTTP request."""

    request: GenerateRequest
    stream: Stream
    prompt: int
    open: int  # choices that have not finished
    began: float  # time.monotonic
    sent: bool = False  # whether the engine process has it
    last: dict[int, float] = field(default_factory=dict)  # choice -> when its latest delta came
    tokens: dict[int, int] = field(default_factory=dict)  # choice -> tokens so far

    @property
    def places(self) -> int:
        """How many choices the engine still has of it: those that have not finished, and those that
        are never told."""
        return self.open + self.request.params.samples - self.request.params.n


class Stream:
    """What one HTTP request waits on. `next()` gives all deltas since the last call, or raises the
    request's ApiError."""

    def __init__(self, client: EngineClient):
        self._client = client
        self.ids: set[str] = set()  # engine requests still in flight
        self.names: dict[str, str] = {}  # fields of the engine's requests as the client calls them
        self._ready: list[tuple[int, TextDelta]] = []
        self._sending = False  # the client is to take something
        self._missed = 0  # what came meanwhile: tokens and logprob entries
        self._read = 0  # the bridge's `reads` when it did
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return not self.ids and not self._ready and self._error is None

    async def next(self) -> list[tuple[int, TextDelta]]:
        """(prompt number, delta) pairs in order of arrival; waits for at least one. Raises ApiError
        when the request failed."""
        self._sending = False
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready

    def sending(self) -> None:
        """From now on until `next` the client is to take what it is sent: what comes meanwhile
        counts as its backlog."""
        self._sending, self._missed = True, 0

    def push(self, prompt: int, delta: TextDelta) -> None:
        """Called by the bridge."""
        if self._sending:
            # The size of a step's burst is no fault of the client's, what it left of those before
            # is
            if self._read != self._client.reads:
                self._read = self._client.reads
                if self._missed > MAX_BACKLOG:
                    self.fail(
                        ApiError(500, "the client does not read its stream", code="slow_client")
                    )
                    return
            self._missed += len(delta.token_ids) + len(delta.logprobs or b"") // BYTES_OF_ENTRY
        self._ready.append((prompt, delta))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the request with an error; whatever is still in the engine is aborted."""
        if self._error is None:
            self._error = error
        self.abort()
        self._wake()

    def abort(self) -> None:
        """Take what is in flight out of the engine; does nothing when all has finished."""
        self._client.abort(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(asyncio.Protocol):
    """Owns the socket. Everything here runs on the event loop's thread; nothing blocks."""

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer | None = None,
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ):
        self._config, self._on_phase = config, on_phase
        self.observer: Observer = observer or NullObserver()
        self._frames = to_server()
        self._entries: dict[str, Entry] = {}
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.died: asyncio.Future[Died] = loop.create_future()
        self.stats = EngineStats()
        self.last_heard = time.monotonic()
        self.reads = 0  # how often something was heard
        self.choices = 0  # in flight
        self._inside = 0  # of them, given to the engine process
        self._held: deque[Entry] = deque()  # not yet given
        self._passing = False  # the rest of what fits is given in the loop's next turn
        self._answers: deque[asyncio.Future[str | None]] = deque()  # answers that are due, in order

    async def connect(self, sock: socket.socket) -> Ready:
        """Send the configuration and wait until the engine takes requests. Raises `EngineDied`."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        self._send(Start(self._config))
        await asyncio.wait((self.ready, self.died), return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            raise EngineDied(self.died.result())
        return self.ready.result()

    @property
    def resolved(self) -> Resolved:
        """The engine's facts; only after `connect`."""
        return self.ready.result().resolved

    @property
    def alive(self) -> bool:
        """Whether the engine process is there and has said that it is ready."""
        return self.ready.done() and not self.died.done()

    @property
    def in_flight(self) -> int:
        """Engine requests that have not ended."""
        return len(self._entries)

    @property
    def capacity(self) -> int:
        """Choices that the engine runs and queues at most."""
        return self.resolved.max_num_seqs + self.resolved.max_num_queued_reqs

    def silence(self) -> float:
        """Seconds without a step although work is outstanding; 0 when idle."""
        if not self._entries:
            return 0.0
        oldest = next(iter(self._entries.values())).began
        return time.monotonic() - max(self.last_heard, oldest)

    def submit(self, requests: list[GenerateRequest]) -> Stream:
        """Take all prompts of one HTTP request, or none. Raises ApiError when there is no room or
        no engine."""
        self.check_room(sum(request.params.samples for request in requests))
        stream = Stream(self)
        now = time.monotonic()
        for number, request in enumerate(requests):
            entry = Entry(request, stream, number, request.params.n, now)
            self._entries[request.id] = entry
            stream.ids.add(request.id)
            self.choices += entry.places
            self._held.append(entry)
        self._pass_on()
        return stream

    def check_room(self, wanted: int) -> None:
        """Raise ApiError unless `wanted` more choices are welcome: nothing is in flight, or all
        together stay within `capacity`."""
        if not self.alive:
            raise server_error("the engine is not running")
        if self.choices and self.choices + wanted > self.capacity:
            message = f"the queue is full ({self.choices} of {self.capacity} choices in flight, {wanted} more asked for); try again later"
            raise overloaded(message, "queue_full")

    def _pass_on(self) -> None:
        """Give the engine what it takes by the same rule; the rest of a request beyond `capacity`
        follows as choices end. What is large is given in several turns of the loop."""
        given = 0
        while self._held and not self._passing:
            entry = self._held[0]
            if entry.request.id in self._entries:
                if self._inside and self._inside + entry.places > self.capacity:
                    return
                entry.sent = True
                self._inside += entry.places
                given += self._send(Add(entry.request))
            self._held.popleft()
            if given > PASS_ON:
                self._passing = True
                asyncio.get_running_loop().call_soon(self._pass_on_more)

    def _pass_on_more(self) -> None:
        self._passing = False
        self._pass_on()

    def abort(self, stream: Stream) -> None:
        """Abort what is in flight of one HTTP request."""
        for id in list(stream.ids):
            entry = self._forget(id)
            self.observer.aborted(entry)
            if entry.sent:
                self._send(Abort(id))
        self._pass_on()

    def fail_all(self, make: Callable[[], ApiError]) -> None:
        """End every request with an error of its own."""
        for stream in {id(entry.stream): entry.stream for entry in self._entries.values()}.values():
            stream.fail(make())

    async def ask(self, message: Profile | ResetPrefixes) -> None:
        """Have the engine process do something besides generating. Raises ApiError when that cannot
        be."""
        if not self.alive:
            raise server_error("the engine is not running")
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._send(message)
        if problem := await answer:
            raise bad_request(sanitize(problem))

    def stop(self) -> None:
        """Tell the engine process to end."""
        self._send(Stop())
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.Protocol"""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol"""
        self.last_heard = time.monotonic()
        self.reads += 1
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except ValueError:
            logger.exception("the engine process sent something that is no message")
            self._dead(Died("the engine process sent something that is no message"))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.Protocol"""
        self._dead(Died("the engine process ended unexpectedly"))

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Outputs):
            before, self.stats = self.stats, message.stats
            if before.self_checks != message.stats.self_checks:
                self._log_check(message.stats)
            for delta in message.deltas:
                self._delta(delta)
        elif isinstance(message, Rejected):
            self._rejected(message)
        elif isinstance(message, Phase):
            self._on_phase(message)
        elif isinstance(message, Answered):
            answer = self._answers.popleft()
            if not answer.done():  # its client has gone
                answer.set_result(message.error)
        elif isinstance(message, Ready):
            self.ready.set_result(message)
        else:
            self._dead(message)

    def _log_check(self, stats: EngineStats) -> None:
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

    def _delta(self, delta: TextDelta) -> None:
        entry = self._entries.get(delta.id)
        if entry is None:  # aborted meanwhile
            return
        self.observer.delta(entry, delta, self.last_heard)
        if delta.finish_reason is not None:
            entry.open -= 1
            self.choices -= 1
            self._inside -= 1
            if entry.open == 0:
                self._forget(delta.id)
        if delta.finish_reason == "error":
            said = sanitize(delta.error or "the engine failed on this request")
            field = entry.stream.names.get(delta.error_param or "", delta.error_param)
            entry.stream.fail(
                server_error(said) if field is None else bad_request(said, field, "unsatisfiable")
            )
        else:
            entry.stream.push(entry.prompt, delta)
        self._pass_on()

    def _rejected(self, message: Rejected) -> None:
        entry = self._entries.get(message.id)
        if entry is None:
            return
        said = sanitize(message.message)
        if message.code in BUSY_CODES:
            error = overloaded(said, message.code)
        elif message.code == "internal_error":
            error = server_error()
        else:
            error = bad_request(said, message.param, message.code)
        self._forget(message.id)
        entry.stream.fail(error)

    def _forget(self, id: str) -> Entry:
        entry = self._entries.pop(id)
        entry.stream.ids.discard(id)
        self.choices -= entry.places
        self._inside -= entry.places if entry.sent else 0
        return entry

    def _send(self, message: ToEngine) -> int:
        """Returns how many bytes it took."""
        if self._transport is None or self._transport.is_closing() or self.died.done():
            return 0
        data = encode(message)
        self._transport.write(data)
        return len(data)

    def _dead(self, died: Died) -> None:
        if self.died.done():
            return
        self.died.set_result(died)
        self.fail_all(lambda: server_error("the engine stopped working; the server is going down"))
        for answer in self._answers:
            if not answer.done():
                answer.set_result("the engine stopped working; the server is going down")
        if self._transport is not None:
            self._transport.close()


class EngineDied(Exception):
    """The engine process ended before it was ready; `died` says why."""

    def __init__(self, died: Died):
        super().__init__(died.reason)
        self.died = died


def launch(
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the engine process in a session of its own (a Ctrl-C is ours to handle) and return our
    end of the socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (*command, "--fd", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return process, ours
