"""Errors of /v1/messages have Anthropic's envelope, whoever refuses."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.anthropic.events import BODY, PATH
from tests.server.harness import Answer, Running, with_settings


def error_of(answer: Answer) -> dict[str, Any]:
    """The error of the envelope, whose shape is checked on the way."""
    found = answer.json()
    assert found.keys() == {"type", "error", "request_id"}
    assert found["type"] == "error" and found["error"].keys() == {"type", "message"}
    assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    error: dict[str, Any] = found["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (PATH, {}, 400, "invalid_request_error"),
        (PATH, b"{", 400, "invalid_request_error"),
        (PATH, BODY | {"model": "other"}, 404, "not_found_error"),
        (f"{PATH}/batches", {}, 404, "not_found_error"),
        (f"{PATH}/count_tokens", {}, 400, "invalid_request_error"),
        (PATH, BODY | {"messages": [{"role": "user", "content": "x" * 255}]}, 400, None),
    ],
)
def test_a_refusal_has_the_envelope(
    server: Running, path: str, body: Any, status: int, kind: str | None
) -> None:
    answer = server.post(path, body)
    assert answer.status == status
    assert error_of(answer)["type"] == (kind or "invalid_request_error")


def test_a_wrong_method_and_other_routes(server: Running) -> None:
    assert error_of(server.get(PATH))["type"] == "invalid_request_error"
    assert server.post("/v1/completions", {}).error["type"] == "invalid_request_error"


def test_a_key_may_come_as_x_api_key(tokenizer: Tokenizer) -> None:
    with Running(tokenizer, with_settings(api_keys=("key",), admin_keys=("root",))) as server:
        refused = server.post(PATH, BODY)
        assert refused.status == 401
        assert error_of(refused)["type"] == "authentication_error"
        for headers in (
            {"x-api-key": "key"},
            {"authorization": "Bearer key"},
            {"x-api-key": "key", "authorization": "Bearer other"},
            {"x-api-key": "root"},
        ):
            assert server.request("POST", PATH, BODY, headers).status == 200
        for headers in ({"x-api-key": "other"}, {"x-api-key": ""}, {"x-api-key": "Bearer key"}):
            assert server.request("POST", PATH, BODY, headers).status == 401
        assert (
            server.request("POST", "/reset_prefix_cache", b"", {"x-api-key": "key"}).status == 403
        )
