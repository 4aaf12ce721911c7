"""Responses that are made without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from jaxllm.server.generate import stream_headers
from jaxllm.server.responses.history import encode
from jaxllm.server.responses.reply import Answer
from jaxllm.server.responses.store import Owner, ResponseStore, Stored, Turn

EVENT_END = b"\n\n"
EVENT_OVERHEAD = 48  # bytes of an event in memory beside its text


class Background(Stored):
    """A stored response that may still be made, and its events if it is streamed.

    Attributes:
        answer: the response while it is made; then only its JSON is kept.
        streamed: whether its events are kept.
        events: server-sent events so far; the place of each is its number.
        cancelled: done once it is to be stopped.
        task: makes it.
    """

    def __init__(self, answer: Answer, owner: Owner, turn: Turn, store: ResponseStore):
        super().__init__(answer.id, owner, turn, len(turn.items), b"")
        self.answer: Answer | None = answer
        self.streamed = answer.request.generation.streaming.enabled
        self._store = store
        self.events: list[bytes] = []
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def json(self) -> bytes:
        """The response as it is now."""
        if self.answer is None:
            return self.body
        return orjson.dumps(self.answer.shape())

    def cancel(self) -> None:
        """Stop making it; does nothing once it has ended."""
        if not self.cancelled.done():
            self.cancelled.set_result(None)

    def forgotten(self) -> None:
        """Nobody can refer to it any more."""
        self.cancel()

    async def collect(self, message: dict[str, Any]) -> None:
        """ASGI's send for what makes it: a body is whole events, or the whole response."""
        if self.streamed and message["type"] == "http.response.body":
            self.add([event + EVENT_END for event in message["body"].split(EVENT_END) if event])

    def add(self, events: list[bytes]) -> None:
        """More events for clients that follow."""
        self.events += events
        self._store.grow(self, sum(EVENT_OVERHEAD + len(event) for event in events))
        self._wake()

    def end(self, answer: Answer) -> None:
        """It has ended: store what it has become."""
        with self._store.changing(self):
            self.turn.items += map(encode, answer.output.items)
            self.body = orjson.dumps(answer.shape())
            self.answer = None
        self._wake()

    async def follow(self, after: int, send: Any) -> None:
        """Send the events after this number as they come, over ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": stream_headers()})
        number = after + 1
        more = True
        while more:
            changed = self._changed
            more = not self.body
            ready = self.events[number:]
            number = max(number, len(self.events))
            if ready or not more:
                data = b"".join(ready)
                await send({"type": "http.response.body", "body": data, "more_body": more})
            if more:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
