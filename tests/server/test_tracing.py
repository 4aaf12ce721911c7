"""Traces, as a collector receives them."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.command_line.options import parse
from tests.server.harness import Open
from tests.server.processes import BODY

collector_proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans; `spans` holds them by name, and `resource` whose they are."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receive)
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Receive(http.server.BaseHTTPRequestHandler):
    """One batch."""

    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            data = gzip.decompress(data)
        batch = collector_proto.ExportTraceServiceRequest.FromString(data)
        for group in batch.resource_spans:
            self.server.resource = {
                pair.key: pair.value.string_value for pair in group.resource.attributes
            }
            self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector on a port of its own."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def found(span: Any) -> dict[str, Any]:
    """A span's attributes."""
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return values


def test_a_request_is_a_span_in_its_clients_trace_without_its_text(
    launch: Any, collector: Collector
) -> None:
    server = launch("--otlp-traces-endpoint", collector.url).up()
    body = json.dumps(BODY | {"n": 2, "max_tokens": 5, "temperature": 0.5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
        f"traceparent: 00-{TRACE}-{PARENT}-01\r\n\r\n"
    )
    for text in (head, head.replace("-01\r", "-00\r"), head.replace(TRACE, "nonsense")):
        with Open(server.port, text.encode() + body) as connection:
            assert connection.answer().status == 200
    with Open(server.port, head.replace("/v1/c", "/v1/x").encode() + body) as connection:
        assert connection.answer().status == 404
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    span, other = collector.spans  # what the client does not sample is not sent
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "llm_request",
        TRACE,
        PARENT,
    )
    assert other.parent_span_id == b""
    assert other.trace_id.hex() != TRACE
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    attributes = found(span)
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.usage.prompt_tokens"] == 3
    assert attributes["gen_ai.usage.completion_tokens"] == 10
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] < attributes["gen_ai.latency.e2e"]
    assert "gen_ai.latency.time_in_queue" in attributes
    assert collector.resource["service.name"] == "jaxllm"


@pytest.mark.slow
def test_a_request_whose_client_goes_is_a_span(launch: Any, collector: Collector) -> None:
    server = launch("--otlp-traces-endpoint", f"{collector.url}/v1/traces", frozen=True).up()
    with server.begin(stream=True):
        server.busy()
    while json.loads(server.get("/health")[1])["running"]:
        pass
    os.kill(server.engine, signal.SIGUSR1)  # it runs on, and can end
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    (span,) = collector.spans
    assert found(span)["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_address_that_is_no_http_address_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--otlp-traces-endpoint", url], {})
    assert "such as http://localhost:4318/v1/traces" in capsys.readouterr().err


def test_without_the_extra_the_start_is_refused_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SystemExit):
        parse(["--otlp-traces-endpoint", "http://localhost:4318"], {})
    assert "pip install 'jaxllm[otel]'" in capsys.readouterr().err
