"""Who may see the message that starts a response: other middleware, at one `send` for all of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OBSERVERS = "jaxllm.response_start"  # key of an ASGI scope


class ResponseStart:
    """ASGI middleware around those that use `on_start`.

    Every part of a streamed body passes it, so it is no coroutine: it adds one comparison. The
    message goes on as it is, since the server leaves in it what writes a stream's tokens
    (`transport.connection.Chunks`).
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI; whatever is no HTTP is left unanswered."""
        if scope["type"] != "http":
            return _nothing()
        observers: list[Callable[[Message], None]] = []
        scope[OBSERVERS] = observers

        def observed(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                for observer in observers:
                    observer(message)
            return send(message)

        return self._app(scope, receive, observed)


async def _nothing() -> None:
    """No answer."""


def on_start(scope: Scope, observer: Callable[[Message], None]) -> None:
    """Call `observer` with the message that starts the response; it may change the message."""
    scope[OBSERVERS].append(observer)


def add_headers(message: Message, *headers: tuple[bytes, bytes]) -> None:
    """Put headers behind those of a message that starts a response."""
    message["headers"] = [*message.get("headers", ()), *headers]
