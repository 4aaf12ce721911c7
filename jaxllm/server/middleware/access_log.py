"""A log line for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server import logs
from jaxllm.server.middleware.response_start import on_start
from jaxllm.server.transport.scope import route_path

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})  # not logged

logger = logging.getLogger(logs.ACCESS)


class AccessLog:
    """ASGI middleware, within `RequestId`. Where nothing is logged, it is no part of the call."""

    def __init__(self, app: ASGIApp):
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI"""
        path = route_path(scope)
        if path in PROBES or not logger.isEnabledFor(logging.INFO):
            return self._app(scope, receive, send)
        return self._logged(path, scope, receive, send)

    async def _logged(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, and log it if it was answered without an exception."""
        began = time.monotonic()
        status = 0  # where no response has begun

        def observe(message: Message) -> None:
            nonlocal status
            status = message["status"]

        on_start(scope, observe)
        await self._app(scope, receive, send)
        log_access(scope["method"], path, status, time.monotonic() - began)


def log_access(method: str, path: str, status: int, seconds: float) -> None:
    """A line about a request; the path is quoted as it came, so that it begins no other line."""
    fields = {
        "method": method[:20],
        "path": quote(path[:200], safe="/:"),
        "status": status,
        "seconds": round(seconds, 6),
    }
    line = " ".join([logs.request_id.get(), *map(str, fields.values())])
    logger.info("%s s", line, extra={"fields": fields})
