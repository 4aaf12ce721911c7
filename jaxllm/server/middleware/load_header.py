"""The load of this replica in a response header, for clients that ask: ORCA, which gateways read.

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto names the fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server.middleware.response_start import add_headers, on_start
from jaxllm.server.transport.scope import header

ASKING = b"endpoint-load-metrics-format"
ANSWER = b"endpoint-load-metrics"


class LoadHeader:
    """ASGI middleware, within `ResponseStart`.

    A request with the header `endpoint-load-metrics-format: TEXT` (or `JSON`) is answered with
    `endpoint-load-metrics`; another format is ignored, as by a server without it. `load()` gives
    the metrics by name, when the response begins.
    """

    def __init__(self, app: ASGIApp, load: Callable[[], Mapping[str, float]]):
        self._app = app
        self._load = load

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI"""
        asked_format = header(scope["headers"], ASKING) or b""
        write = FORMATS.get(asked_format.strip().upper())
        if write is not None:
            on_start(scope, lambda message: add_headers(message, (ANSWER, write(self._load()))))
        return self._app(scope, receive, send)


def as_text(metrics: Mapping[str, float]) -> bytes:
    """TEXT named_metrics.a=1, named_metrics.b=0.5"""
    pairs = (f"named_metrics.{name}={value:g}" for name, value in metrics.items())
    return f"TEXT {', '.join(pairs)}".encode()


def as_json(metrics: Mapping[str, float]) -> bytes:
    """JSON {"named_metrics": {"a": 1, "b": 0.5}}"""
    return b"JSON " + orjson.dumps({"named_metrics": dict(metrics)})


FORMATS = {b"TEXT": as_text, b"JSON": as_json}
