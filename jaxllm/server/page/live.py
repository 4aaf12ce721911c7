"""What the engine does, once a second, for everybody who watches.

One task makes the frames for all listeners, and only while there are any. A listener who does not
read misses frames. A frame holds counts and times, never a request's text, and its size is bounded:
the map of a pool has at most 1024 cells.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any

import orjson
from starlette.requests import Request

import jaxllm
from jaxllm.messages import EngineView
from jaxllm.server.errors import ApiError, overloaded
from jaxllm.server.generate import stream_headers
from jaxllm.server.requests.model_name import check_asked
from jaxllm.server.state import ServerState
from jaxllm.server.transport.gone import until_gone

PERIOD = 1.0  # seconds between frames
MAX_LISTENERS = 16

logger = logging.getLogger("jaxllm.server")

type Frame = asyncio.Future[bytes]  # b"" is the last one


class LiveStats:
    """GET /stats/stream: server-sent events, each a whole frame but the first, which is named
    `history`. An ASGI endpoint."""

    def __init__(self, server_state: ServerState):
        self._server_state = server_state
        self._listeners = 0
        self._producer: asyncio.Task[None] | None = None
        self._next: Frame | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI; raises ApiError when too many listen, or another model is asked about."""
        check_asked(Request(scope).query_params, self._server_state.settings.served)
        if self._listeners == MAX_LISTENERS:
            raise overloaded(
                f"{MAX_LISTENERS} clients watch the engine, which is the most; close one",
                "stats_full",
            )
        start = {"type": "http.response.start", "status": 200, "headers": stream_headers()}
        if scope["method"] == "HEAD":
            await send(start)
            return await send({"type": "http.response.body"})
        gone = asyncio.ensure_future(until_gone(receive))
        self._enter()
        try:
            await send(start)
            await send(self._past())
            await self._send_frames(gone, send)
        finally:
            self._leave()
            gone.cancel()

    def _past(self) -> dict[str, Any]:
        """The event that comes first: what was before anybody listened."""
        columns = orjson.dumps(self._server_state.recorder.columns())
        event = b"event: history\ndata: " + columns + b"\n\n"
        return {"type": "http.response.body", "body": event, "more_body": True}

    def _enter(self) -> None:
        self._listeners += 1
        self._server_state.recorder.start()
        if self._producer is None or self._producer.done():
            self._next = asyncio.get_running_loop().create_future()
            self._producer = asyncio.ensure_future(self._produce())

    def _leave(self) -> None:
        self._listeners -= 1
        if not self._listeners and self._producer is not None:
            self._producer.cancel()
            self._producer = None

    async def _send_frames(self, gone: asyncio.Future[None], send: Any) -> None:
        more = True
        while more:
            assert self._next is not None
            frame = self._next
            await asyncio.wait((frame, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            more = bool(frame.result())
            await send({"type": "http.response.body", "body": frame.result(), "more_body": more})

    async def _produce(self) -> None:
        frames = Frames(self._server_state)
        try:
            while not self._server_state.draining:
                self._publish(b"data: " + orjson.dumps(await frames.make()) + b"\n\n")
                await asyncio.sleep(PERIOD)
        except Exception:
            logger.exception("the stream of statistics failed")
        finally:
            frames.close()
        self._publish(b"")

    def _publish(self, data: bytes) -> None:
        assert self._next is not None
        frame = self._next
        self._next = asyncio.get_running_loop().create_future()
        frame.set_result(data)


class Frames:
    """Makes the frames of one run of the producer."""

    def __init__(self, server_state: ServerState):
        self._server_state = server_state
        self._inspection: asyncio.Future[EngineView] | None = None

    async def make(self) -> dict[str, Any]:
        """The next frame. `pools` and `step_totals` are missing when the engine does not answer
        within a period: it is gone, or in a long step."""
        client = self._server_state.client
        resolved = self._server_state.resolved
        recorder = self._server_state.recorder
        view = await self._inspect()
        frame = {
            "time": time.monotonic(),
            "version": jaxllm.__version__,
            "model": self._server_state.settings.served[0],
            "max_model_len": resolved.max_model_len,
            "max_num_seqs": resolved.max_num_seqs,
            "alive": client.alive,
            "silent_seconds": round(client.seconds_without_step(), 1),
            **{f.name: getattr(client.stats, f.name) for f in dataclasses.fields(client.stats)},
            "ttft": recorder.first_token.summary(),
            "itl": recorder.between_tokens.summary(),
        }
        del frame["self_check_problem"], frame["step_tokens"]
        return frame if view is None else frame | dataclasses.asdict(view)

    def close(self) -> None:
        """Nobody waits for the engine's answer any more."""
        if self._inspection is not None:
            self._inspection.cancel()

    async def _inspect(self) -> EngineView | None:
        """The engine's answer; one question is open at most."""
        try:
            if self._inspection is None:
                self._inspection = asyncio.ensure_future(self._server_state.client.inspect())
            await asyncio.wait((self._inspection,), timeout=PERIOD)
            if not self._inspection.done():
                return None
            inspection = self._inspection
            self._inspection = None
            return inspection.result()
        except ApiError:
            self._inspection = None
            return None
