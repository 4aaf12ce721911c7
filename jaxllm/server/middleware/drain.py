"""No new work for a server that stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server.errors import shutting_down
from jaxllm.server.middleware.auth import Refuse, is_open
from jaxllm.server.transport.scope import route_path


class Drain:
    """ASGI middleware. While `draining()`, requests that start work are refused; those that ask how
    the server does are answered."""

    def __init__(
        self,
        app: ASGIApp,
        draining: Callable[[], bool],
        refuse: Refuse,
    ):
        self._app = app
        self._draining = draining
        self._refuse = refuse

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI"""
        if scope["method"] == "POST" and self._draining() and not is_open(route_path(scope)):
            return self._refuse(shutting_down(), scope, receive, send)
        return self._app(scope, receive, send)
