"""Requests in flight, and the streams of deltas that HTTP requests wait on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxllm.messages import GenerateRequest, PoolingRequest, TextDelta
from jaxllm.server.errors import ApiError

# Tokens and logprob entries that may arrive while a client does not read its stream
MAX_BACKLOG = 1 << 17
BYTES_PER_ENTRY = 8  # a token's id or rank, and its log-probability


class Observer:
    """Notified of what happens to requests. This one counts nothing; metrics derive from it."""

    def submitted(self, entry: InFlight) -> None:
        """A request was taken, by the task of its HTTP request."""

    def delta(self, entry: InFlight, delta: TextDelta, now: float) -> None:
        """A delta arrived at `now` (time.monotonic)."""

    def aborted(self, entry: InFlight) -> None:
        """A request was aborted."""

    def step_failed(self) -> None:
        """A step of the engine failed."""

    def engine_restarted(self) -> None:
        """Another engine process is being started."""


@dataclass(slots=True)
class InFlight:
    """One engine request: prompt number `prompt` of one HTTP request.

    Attributes:
        open_choices: choices without a finish reason.
        submitted: time.monotonic of the HTTP request.
        waiting_tokens: of its prompt, until there is a first output.
        load: tokens of its prompt and its choices so far.
        sent: whether the engine process has it.
        last_delta: time.monotonic of each choice's latest delta.
        tokens: tokens of each choice so far.
        trace: of an observer that makes traces.
    """

    request: GenerateRequest | PoolingRequest
    stream: Stream
    prompt: int
    open_choices: int
    submitted: float
    waiting_tokens: int = 0
    load: int = 0
    sent: bool = False
    last_delta: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    trace: Any = None

    @property
    def engine_choices(self) -> int:
        """Choices that the engine still runs: open ones, and those of best_of never returned."""
        return self.open_choices + self.request.params.samples - self.request.params.n


class Stream:
    """The deltas of one HTTP request.

    Attributes:
        ids: engine requests still in flight.
        field_names: engine fields under the names that the client used.
    """

    def __init__(self, abort: Callable[[Stream], None]):
        """`abort` takes the stream's requests out of the engine."""
        self._abort = abort
        self.ids: set[str] = set()
        self.field_names: dict[str, str] = {}
        self._ready: list[tuple[int, TextDelta]] = []
        self._writing = False  # the client has not yet taken the last write
        self._backlog = 0  # tokens and logprob entries that arrived since
        self._counted = 0  # the read of the engine's socket that the backlog includes
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[int, TextDelta], bool] | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return not self.ids and not self._ready and self._error is None

    async def next_deltas(self) -> list[tuple[int, TextDelta]]:
        """(prompt number, delta) pairs since the last call, in order; waits for at least one.

        Raises the request's error.
        """
        self._writing = False
        while not self._ready:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready = self._ready
        self._ready = []
        return ready

    def begin_write(self) -> None:
        """Count deltas as the client's backlog from now until `next_deltas`."""
        self._writing = True
        self._backlog = 0

    def write_at_once(self, write: Callable[[int, TextDelta], bool]) -> None:
        """Have deltas written as they come while `next_deltas` waits, which then sleeps on: a task
        that wakes costs as much as a write. `write` returns whether it took the delta."""
        self._at_once = write

    def push(self, prompt: int, delta: TextDelta, read: int, behind: bool = False) -> None:
        """Add a delta that came with a numbered read of the engine's socket; fails the request when
        its client has fallen too far behind. `behind`: more steps came with this read, so that
        their deltas are better written together."""
        if not behind and self._written(prompt, delta):
            return
        if self._writing:
            # A step's burst is not the client's fault; the backlog before it is
            if self._counted != read and self._backlog > MAX_BACKLOG:
                error = ApiError(500, "the client does not read its stream", code="slow_client")
                return self.fail(error)
            self._counted = read
            self._backlog += len(delta.token_ids) + len(delta.logprobs or b"") // BYTES_PER_ENTRY
        self._ready.append((prompt, delta))
        self._wake()

    def _written(self, prompt: int, delta: TextDelta) -> bool:
        """Whether a delta needs nothing more: it was written, or its request has failed."""
        if self._at_once is None or self._waiter is None or self._waiter.done():
            return False
        try:
            return self._at_once(prompt, delta)
        except Exception as error:  # of one stream, whose task tells
            self.fail(error)
            return True

    def fail(self, error: Exception) -> None:
        """End the request with an error; requests still in the engine are aborted."""
        if self._error is None:
            self._error = error
        self.abort()
        self._wake()

    def abort(self) -> None:
        """Take what is in flight out of the engine; does nothing when all has finished."""
        self._abort(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
