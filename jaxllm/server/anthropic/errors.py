"""Errors in the envelope of the Messages API."""

from __future__ import annotations

from typing import Any

from jaxllm.server.errors import OVERFLOW, ApiError, ContextOverflow

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_messages_path(path: str) -> bool:
    """Whether a route's errors have this envelope."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def message_of(error: ApiError) -> str:
    """The error's text; of a prompt that is too long, in Anthropic's words, by which its clients
    know that they have to shorten the conversation."""
    if isinstance(error, ContextOverflow):
        # A prompt as long as the context leaves no room for an answer
        most = min(error.limit, error.tokens - 1)
        return f"prompt is too long: {error.tokens} tokens > {most} maximum"
    if error.code == OVERFLOW:
        return f"prompt is too long: {error.message}"
    return error.message


def envelope(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error's reply, and the data of an error event."""
    general = "invalid_request_error"
    if error.status >= 500:
        general = "api_error"
    return {
        "type": "error",
        "error": {"type": TYPES.get(error.status, general), "message": message_of(error)},
        "request_id": request_id,
    }
