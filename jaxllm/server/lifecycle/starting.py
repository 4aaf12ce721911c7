"""What a server answers while its models load: how far they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import PlainTextResponse, Response

import jaxllm
from jaxllm.server.app import guarded, refuse
from jaxllm.server.endpoint import Json
from jaxllm.server.errors import overloaded
from jaxllm.server.state import Settings
from jaxllm.server.transport.scope import route_path

RETRY_AFTER = 5  # seconds
REFRESH = 2  # seconds until a browser asks again


class Starting:
    """The ASGI application of a process from its first second: it answers itself until `open`, and
    then has the whole application answer.

    Args:
        progress: how far the start is, in words.
    """

    def __init__(self, settings: Settings, progress: Callable[[], str]):
        self._page = settings.page
        self._progress = progress
        self._app: Any = guarded(self._answer, settings, lambda: False)

    def open(self, app: Any) -> None:
        """Answer with this application from now on, also on connections that are open."""
        self._app = app

    def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        """ASGI, at no cost for each request."""
        answer: Awaitable[None] = self._app(scope, receive, send)
        return answer

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = route_path(scope)
        progress = self._progress()
        reply: Response
        if path in ("/health", "/ping"):
            reply = Json(loading(progress), 503)
        elif path == "/ready":
            reply = Json({"status": "loading", "progress": progress}, 503)
        elif path == "/version":
            reply = Json({"version": jaxllm.__version__})
        elif path == "/" and self._page:
            reply = PlainTextResponse(
                f"jaxllm is starting\n{progress}\n", 503, {"refresh": str(REFRESH)}
            )
        else:
            error = overloaded(
                f"the server is starting ({progress}); try again when /ready answers 200",
                "loading",
                RETRY_AFTER,
            )
            return await refuse(error, scope, receive, send)
        await reply(scope, receive, send)


def loading(progress: str) -> dict[str, Any]:
    """What /health says of a server whose models load."""
    return {
        "status": "loading",
        "progress": progress,
        "running": 0,
        "waiting": 0,
        "last_step_age_s": 0.0,
    }
