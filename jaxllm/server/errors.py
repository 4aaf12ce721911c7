"""Errors as clients see them: one envelope, bounded and free of internals."""

from __future__ import annotations

import re

import orjson

MAX_MESSAGE = 1000
MAX_ECHO = 200
OVERFLOW = "context_length_exceeded"  # the code of every refusal of a prompt that is too long
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_PATH = re.compile(r"(?<![\w/:.])(?:/[\w.@+~-]+){2,}/?")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class ApiError(Exception):
    """An error that a client sees: a whole HTTP reply, or one event in a stream."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = bounded(message)
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        general = "invalid_request_error"
        if self.status >= 500:
            general = "server_error"
        return ERROR_TYPES.get(self.status, general)

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body of the reply."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def http_reply(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body of the reply, as ASGI and h11 take them."""
        body = orjson.dumps(self.envelope())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **self.headers,
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()], body


class ContextOverflow(ApiError):
    """The 400 for a prompt that the context does not hold, in the words by which clients notice it
    and shorten their conversation.

    Attributes:
        tokens: of the prompt, or the least that it can have.
        limit: tokens of the model's context.
    """

    def __init__(
        self,
        limit: int,
        tokens: int,
        param: str | None,
        counted: str = "",
        remedy: str = "shorten it",
        generates: bool = True,
    ):
        """`counted` is what was counted in place of tokens, which are then the least; `generates`
        says that one of the context's tokens is for the answer."""
        size = f"{tokens} tokens"
        if counted:
            size = f"at least {tokens} tokens ({counted})"
        elif generates:
            size += " and at least one must be generated"
        super().__init__(
            400,
            f"this model's maximum context length is {limit} tokens, "
            f"but the prompt has {size}; the prompt is too long: {remedy}",
            param=param,
            code=OVERFLOW,
        )
        self.tokens = tokens
        self.limit = limit


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def too_many(limit: int, reason: str, param: str) -> ApiError:
    """The 400 for a conversation of more parts than are read, whose tokens nobody has counted, in
    the words of `ContextOverflow`; `limit` is its."""
    return bad_request(
        f"this model's maximum context length is {limit} tokens, but {reason}; "
        "the prompt is too long: shorten it",
        param,
        OVERFLOW,
    )


def overloaded(message: str, code: str | None = None, retry_after: int = 1) -> ApiError:
    """A 503 that asks the client to try again after so many seconds."""
    headers = {"retry-after": str(retry_after), "x-should-retry": "true"}
    return ApiError(503, message, code=code, headers=headers)


def shutting_down() -> ApiError:
    """The 503 of a server that takes no new work."""
    return overloaded("the server is shutting down", "draining")


def server_error(message: str = "the server failed to answer this request") -> ApiError:
    """A 500, whose message must hold no internals."""
    return ApiError(500, message, code="internal_error")


def sanitize(text: str) -> str:
    """The text of an exception without addresses, absolute file paths and tracebacks, `bounded`."""
    text = _TRACEBACK.sub("internal error", text[: 20 * MAX_MESSAGE])
    return bounded(_PATH.sub("<path>", _ADDRESS.sub("0x…", text)))


def bounded(text: str) -> str:
    """`text` without control characters, cut at MAX_MESSAGE characters."""
    text = _CONTROL.sub(" ", text[: 2 * MAX_MESSAGE]).encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MAX_MESSAGE:
        return text
    return text[: MAX_MESSAGE - 1] + "…"


def describe(value: object) -> str:
    """A client's value for an error message, cut at MAX_ECHO; containers are not echoed."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = repr(value).lower()
    else:
        text = repr(value)
    if len(text) <= MAX_ECHO:
        return text
    return text[: MAX_ECHO - 1] + "…"
