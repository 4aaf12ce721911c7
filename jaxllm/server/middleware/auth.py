"""API keys: which routes need one, and who has it."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server.errors import ApiError
from jaxllm.server.transport.scope import header, route_path

# Open without a key; all other paths need one
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/ping", "/", "/docs", "/openapi.json"})
OPEN_FOLDERS = ("/page/", "/docs/")  # files of pages; one asks for a key itself
# Need an operator's key
ADMIN_PATHS = frozenset(
    {"/reset_prefix_cache", "/start_profile", "/stop_profile"}
    | {"/sleep", "/wake_up", "/update_weights"}
)

# Answers a refused request
type Refuse = Callable[[ApiError, Scope, Receive, Send], Awaitable[None]]


class Auth:
    """ASGI middleware.

    Without `keys`, clients need none. `admin_keys` open every route, and only they open
    ADMIN_PATHS.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        refuse: Refuse,
    ):
        self._app = app
        self._refuse = refuse
        self._keys = digests(keys)
        self._admin_keys = digests(admin_keys)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI"""
        refusal = self._refusal(route_path(scope), scope["headers"])
        if refusal is not None:
            return self._refuse(refusal, scope, receive, send)
        return self._app(scope, receive, send)

    def _refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        """The 401 or 403 of a request whose keys do not open the path."""
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
            remedy = "start the server with --admin-key"
            if self._admin_keys:
                remedy = "send it as Authorization: Bearer KEY"
            return ApiError(
                403, f"{path} takes the operator's key alone: {remedy}", code="admin_key_needed"
            )
        return None


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key: the keys themselves are not kept."""
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def sent_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a client sends: as Authorization: Bearer, and as x-api-key, which clients of
    Anthropic's protocol use."""
    keys: list[bytes] = []
    scheme, _, bearer = (header(headers, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer":
        keys.append(bearer.strip())
    api_key = header(headers, b"x-api-key")
    if api_key is not None:
        keys.append(api_key.strip())
    return keys


def authorised(sent: Iterable[bytes], keys: Iterable[bytes]) -> bool:
    """Whether one of the keys sent has one of these digests, in constant time: every key is always
    compared with every digest."""
    pairs = itertools.product([hashlib.sha256(key).digest() for key in sent], keys)
    matches = [secrets.compare_digest(digest, known) for digest, known in pairs]
    return any(matches)


def caller(headers: list[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> bytes:
    """SHA-256 of the key by which a client was let in, to tell clients apart: the first of the keys
    that it sends which has one of these digests."""
    known = (key for key in sent_keys(headers) if authorised((key,), keys))
    return hashlib.sha256(next(known, b"")).digest()
