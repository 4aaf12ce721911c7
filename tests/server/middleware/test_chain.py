"""Middleware that every request passes: in which order, and at what cost for a stream."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest

from jaxllm.server import logs
from jaxllm.server.app import guarded
from jaxllm.server.transport.connection import CHUNKS
from tests.server.harness import SETTINGS, with_settings

PARTS = [b"one ", b"two "]


def scope_of(method: str, path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "headers": list(headers)}


class Exchange:
    """A request of an application, and what the server sees of the response.

    Attributes:
        sent: the messages, each as it is when the server gets it.
        coroutines: how many coroutines were between the route and the server, for each message.
        chunks: what the route has found in the message that starts the response.
    """

    def __init__(self, draining: bool = False, settings: Any = SETTINGS):
        self.sent: list[dict[str, Any]] = []
        self.coroutines: list[int] = []
        self.chunks: Any = None
        self._app = guarded(self._route, settings, lambda: draining)

    def run(self, scope: dict[str, Any]) -> Exchange:
        async def no_message() -> dict[str, Any]:
            raise AssertionError("nobody reads the body")

        asyncio.run(self._answer(scope, no_message))
        return self

    async def _answer(self, scope: dict[str, Any], receive: Any) -> None:
        await self._app(scope, receive, self._send)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(dict(message))
        message[CHUNKS] = "chunks"

    async def _route(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 207, "headers": [(b"a", b"b")]}
        await send(start)
        self.chunks = start[CHUNKS]
        for part in PARTS:
            sending = send({"type": "http.response.body", "body": part, "more_body": True})
            between = 0
            if inspect.iscoroutine(sending):
                between = int(sending.cr_code is not Exchange._send.__code__)
            self.coroutines.append(between)
            await sending

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])


def test_parts_of_a_stream_pass_without_a_coroutine_and_its_head_comes_back() -> None:
    exchange = Exchange().run(scope_of("POST", "/v1/completions"))
    assert [message.get("body") for message in exchange.sent[1:]] == PARTS
    assert exchange.coroutines == [0, 0]
    assert exchange.chunks == "chunks"


def test_every_response_carries_the_id_of_its_request() -> None:
    scope = scope_of("GET", "/v1/models", (b"x-request-id", b"mine \n<b>"))
    exchange = Exchange().run(scope)
    assert exchange.head == {b"a": b"b", b"x-request-id": b"mineb", b"request-id": b"mineb"}
    assert scope["state"]["request_id"] == "mineb"
    refused = Exchange(settings=with_settings(api_keys=("k",))).run(scope_of("GET", "/v1/models"))
    assert refused.sent[0]["status"] == 401
    assert len(refused.head[b"x-request-id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 503),
        ("GET", "/v1/models", 207),
        ("POST", "/ping", 207),
    ],
)
def test_a_server_that_stops_takes_no_work_and_answers_probes(
    method: str, path: str, status: int
) -> None:
    assert Exchange(draining=True).run(scope_of(method, path)).sent[0]["status"] == status


def test_a_key_is_asked_for_before_the_server_says_that_it_stops() -> None:
    exchange = Exchange(draining=True, settings=with_settings(api_keys=("k",)))
    assert exchange.run(scope_of("POST", "/v1/completions")).sent[0]["status"] == 401


def test_the_status_is_logged_of_what_is_no_probe(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logs.ACCESS):
        for path in ("/health", "/v1/models"):
            Exchange().run(scope_of("GET", path, (b"x-request-id", b"it")))
    (record,) = caplog.records
    assert record.getMessage().startswith("it GET /v1/models 207 ")
    with caplog.at_level(logging.WARNING, logs.ACCESS):
        Exchange().run(scope_of("GET", "/v1/models"))
    assert len(caplog.records) == 1


def test_what_is_no_http_is_left_alone() -> None:
    assert Exchange().run({"type": "lifespan"}).sent == []
