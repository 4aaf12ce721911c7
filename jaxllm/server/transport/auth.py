"""The first checks of every request: request id, API key, draining. Plain ASGI; a chunk of a stream
passes one comparison."""

from __future__ import annotations

import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import quote

from jaxllm.server import logs
from jaxllm.server.errors import ApiError, shutting_down

# Open without a key; all other paths need one
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/ping", "/", "/docs", "/openapi.json"})
OPEN_FOLDERS = ("/page/", "/docs/")  # files of pages; one asks for a key itself
# Need an operator's key
ADMIN_PATHS = frozenset(
    {"/reset_prefix_cache", "/start_profile", "/stop_profile"}
    | {"/sleep", "/wake_up", "/update_weights"}
)
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})  # not logged
MAX_REQUEST_ID = 128
ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")

logger = logging.getLogger(logs.ACCESS)


class AuthMiddleware:
    """Wraps the routes.

    Without `keys`, clients need none. `admin_keys` open every route, and only they open
    ADMIN_PATHS. While `draining()`, requests that start work are refused. `refuse` answers a
    refused request: ASGI with the error first.
    """

    def __init__(
        self,
        app: Any,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        draining: Callable[[], bool],
        refuse: Callable[[ApiError, dict[str, Any], Any, Any], Awaitable[None]],
    ):
        self._app, self._refuse = app, refuse
        self._keys, self._admin_keys = digests(keys), digests(admin_keys)
        self._draining = draining

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        if scope["type"] != "http":
            return
        headers = scope["headers"]
        request_id = clean_id(header(headers, b"x-request-id")) or secrets.token_hex(16)
        echo = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]
        began = time.monotonic()
        status = 0

        async def tagged(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *echo]
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        logs.request_id.set(request_id)
        path = route_path(scope)
        refusal = self._refusal(scope, path, headers)
        if refusal is None:
            await self._app(scope, receive, tagged)
        else:
            await self._refuse(refusal, scope, receive, tagged)
        if path not in PROBES and logger.isEnabledFor(logging.INFO):
            log_access(scope["method"], path, status, time.monotonic() - began)

    def _refusal(
        self, scope: dict[str, Any], path: str, headers: list[tuple[bytes, bytes]]
    ) -> ApiError | None:
        if is_open(path):
            return None
        sent = sent_keys(headers)
        if self._keys and not authorised(sent, self._keys + self._admin_keys):
            return ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY, "
                "or x-api-key: KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if path in ADMIN_PATHS and not authorised(sent, self._admin_keys):
            remedy = (
                "send it as Authorization: Bearer KEY"
                if self._admin_keys
                else "start the server with --admin-key"
            )
            return ApiError(
                403, f"{path} takes the operator's key alone: {remedy}", code="admin_key_needed"
            )
        if scope["method"] == "POST" and self._draining():
            return shutting_down()
        return None


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


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key: the keys themselves are not kept."""
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def sent_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a client sends: as Authorization: Bearer, and as x-api-key, which clients of
    Anthropic's protocol use."""
    scheme, _, bearer = (header(headers, b"authorization") or b"").partition(b" ")
    own = header(headers, b"x-api-key")
    found = [bearer.strip()] if scheme.lower() == b"bearer" else []
    return found if own is None else [*found, own.strip()]


def authorised(sent: Iterable[bytes], keys: Iterable[bytes]) -> bool:
    """Whether one of the keys sent has one of these digests, in constant time: each is always
    compared with every digest."""
    pairs = itertools.product([hashlib.sha256(key).digest() for key in sent], keys)
    found = [secrets.compare_digest(digest, known) for digest, known in pairs]
    return any(found)


def caller(headers: list[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> bytes:
    """SHA-256 of the key by which a client was let in, to tell clients apart: of those that it
    sends, the first with one of these digests."""
    found = (key for key in sent_keys(headers) if authorised((key,), keys))
    return hashlib.sha256(next(found, b"")).digest()


def route_path(scope: dict[str, Any]) -> str:
    """The path that the router sees: the ASGI path without the root path. No header changes it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first header of that name."""
    return next((value for key, value in headers if key == name), None)


def clean_id(value: bytes | None) -> str:
    """A client's request id, cut and without unsafe characters. It is a label, never a key."""
    text = (value or b"")[:MAX_REQUEST_ID].decode("latin-1")
    return "".join(c for c in text if c in ID_CHARS)


async def send_error(error: ApiError, send: Any) -> None:
    """An error as a whole HTTP reply."""
    headers, body = error.http_reply()
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
