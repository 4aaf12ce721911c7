"""The id of a request: the client's own, or a new one."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server import logs
from jaxllm.server.middleware.response_start import add_headers, on_start
from jaxllm.server.transport.scope import header

MAX_REQUEST_ID = 128
ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


class RequestId:
    """ASGI middleware, within `ResponseStart`. The id is in the request's state, in the log lines
    about it and in two headers of the response: OpenAI's and Anthropic's name."""

    def __init__(self, app: ASGIApp):
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI"""
        request_id = clean_id(header(scope["headers"], b"x-request-id")) or secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)
        value = request_id.encode()
        on_start(
            scope,
            lambda message: add_headers(message, (b"x-request-id", value), (b"request-id", value)),
        )
        return self._app(scope, receive, send)


def clean_id(value: bytes | None) -> str:
    """A client's request id, cut and without unsafe characters. It is a label, never a key."""
    text = (value or b"")[:MAX_REQUEST_ID].decode("latin-1")
    return "".join(character for character in text if character in ID_CHARS)
