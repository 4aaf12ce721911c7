"""Errors in the envelope of the Messages API."""

from __future__ import annotations

from typing import Any

from jaxllm.server.errors import ApiError

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


def envelope(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error's reply, and the data of an error event."""
    general = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": TYPES.get(error.status, general), "message": error.message},
        "request_id": request_id,
    }
