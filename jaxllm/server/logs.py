"""Log lines on stderr, as text or as one JSON object a line with the id of the request."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import orjson

FORMATS = ("text", "json")
ACCESS = "jaxllm.access"  # logger of requests
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Of the request that the running task answers; "" outside of requests
request_id: ContextVar[str] = ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and where they are known
    request_id, exception, and the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """logging's hook."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if id := request_id.get():
            entry["request_id"] = id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps({name: _clean(value) for name, value in entry.items()}).decode()


def _clean(value: Any) -> Any:
    """Text that UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value


def configure(level: str, format: str, access: bool = False) -> None:
    """Send every log line to stderr in one of FORMATS, from `level` on, and with `access` a line
    for each request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(TEXT))
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=least, handlers=[handler])
    logging.captureWarnings(format == "json")
    for name in ("asyncio", "jax", "uvicorn"):
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    if access or level == "debug":
        logging.getLogger(ACCESS).setLevel(logging.INFO)
    else:
        logging.getLogger(ACCESS).setLevel(logging.WARNING)
