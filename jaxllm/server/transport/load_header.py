"""The load of this replica in a response header, for clients that ask: ORCA, which gateways read.

https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto names the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

ASKING = b"endpoint-load-metrics-format"
ANSWER = b"endpoint-load-metrics"


class LoadHeader:
    """ASGI middleware. A request with the header `endpoint-load-metrics-format: TEXT` (or `JSON`)
    is answered with `endpoint-load-metrics`; another format is ignored, as by a server without it.

    `load()` gives the metrics by name, when the response begins.
    """

    def __init__(self, app: Any, load: Callable[[], Mapping[str, float]]):
        self._app, self._load = app, load

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        asked = next((value for name, value in scope.get("headers", ()) if name == ASKING), b"")
        write = FORMATS.get(asked.strip().upper())
        if write is None:
            return await self._app(scope, receive, send)

        async def with_load(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                header = (ANSWER, write(self._load()))
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, with_load)


def as_text(metrics: Mapping[str, float]) -> bytes:
    """TEXT named_metrics.a=1, named_metrics.b=0.5"""
    pairs = (f"named_metrics.{name}={value:g}" for name, value in metrics.items())
    return f"TEXT {', '.join(pairs)}".encode()


def as_json(metrics: Mapping[str, float]) -> bytes:
    """JSON {"named_metrics": {"a": 1, "b": 0.5}}"""
    return b"JSON " + orjson.dumps({"named_metrics": dict(metrics)})


FORMATS = {b"TEXT": as_text, b"JSON": as_json}
