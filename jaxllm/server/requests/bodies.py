"""Reading request bodies under limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxllm.server.errors import ApiError, bounded, overloaded, shutting_down
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.digits import keep_digits, may_hold_long
from jaxllm.server.requests.fields import read_object
from jaxllm.server.requests.large_bodies import TURN, LargeBodies, raw_fields
from jaxllm.server.requests.limits import Rules
from jaxllm.server.transport.gone import ClientGone
from jaxllm.server.transport.scope import header

BODY_DEADLINE = 60.0  # seconds for a whole body to arrive
COMPRESSED = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress"})
PARSED = "jaxllm.body"  # key of an ASGI scope: the body as it was read already
TOTAL = 1 << 30  # bytes of all bodies being read


class Bodies:
    """Reads request bodies of up to `limit` bytes each, and `total` bytes at a time.

    `fields` are those of all routes; prompts in large bodies are checked by `rules`.
    """

    def __init__(self, limit: int, fields: BodyFields, rules: Rules, total: int = TOTAL):
        self._limit = limit
        self._total = max(total, limit)
        self._large = LargeBodies(fields, rules)
        self.bytes_read = 0
        self._deadlines: set[asyncio.Timeout] = set()  # of bodies still arriving
        self._refusing = False

    def refuse_all(self) -> None:
        """Refuse bodies that are still arriving, and all later ones."""
        self._refusing = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    async def read_json(self, scope: dict[str, Any], receive: Any) -> dict[str, Any]:
        """The JSON object in a request's body, or the one that was read of it before.

        Raises ApiError: 400 malformed, 408 too slow, 413 too large, 415 wrong type, 503 when too
        much arrives at once or the server stops.
        """
        if PARSED in scope:
            return scope[PARSED]
        check_encoding(scope["headers"])
        chunks: list[bytes] = []
        try:
            await self._receive(scope, receive, chunks)
            body = b"".join(chunks)
            if len(body) <= TURN:
                fields = read_small(body)
            else:
                fields = await self._large.read(body)
        finally:
            self.bytes_read -= sum(map(len, chunks))
        check_type(scope["headers"])
        return fields

    async def _receive(self, scope: dict[str, Any], receive: Any, chunks: list[bytes]) -> None:
        """Receive the body into `chunks`, under the limits."""
        declared = header(scope["headers"], b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._limit:
            raise too_large(self._limit)
        size = 0
        try:
            async with asyncio.timeout(0 if self._refusing else BODY_DEADLINE) as deadline:
                self._deadlines.add(deadline)
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    self.bytes_read += len(chunks[-1])
                    if size > self._limit:
                        raise too_large(self._limit)
                    if self.bytes_read > self._total:
                        raise overloaded(
                            f"{self._total} bytes of other requests' bodies are being read; "
                            "retry later",
                            "bodies_full",
                        )
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            if self._refusing:
                raise shutting_down() from None
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_DEADLINE:g} seconds",
                code="request_timeout",
                headers={"connection": "close"},  # the rest of the body may never come
            ) from None
        finally:
            self._deadlines.discard(deadline)


def check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse compressed bodies: a small one could expand to a large one."""
    encoding = (header(headers, b"content-encoding") or b"").strip().lower()
    if not COMPRESSED.isdisjoint(name.strip() for name in encoding.split(b",")):
        raise ApiError(
            415,
            f"the body is compressed ({bounded(encoding.decode('latin-1'))}); send it as it is",
            code="unsupported_media_type",
        )


def check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a browser's body that is not declared as JSON: pages of other origins can send such
    bodies. Other clients need not declare it."""
    declared = (header(headers, b"content-type") or b"").split(b";")[0].strip().lower()
    if declared == b"application/json" or declared.endswith(b"+json"):
        return
    if header(headers, b"origin") is not None:
        raise ApiError(
            415,
            "send the body with the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def too_large(limit: int) -> ApiError:
    """The 413."""
    return ApiError(
        413, f"the body is larger than {limit} bytes (--max-body-size)", code="request_too_large"
    )


def read_small(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    fields = read_object(body)
    if isinstance(fields.get("messages"), list) and may_hold_long(body):
        keep_digits(fields["messages"], bytes(raw_fields(body)["messages"]))
    return fields
