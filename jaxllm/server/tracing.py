"""OpenTelemetry: a span for each request of the engine, in the trace of its client.

Needs the extra `otel`. Spans hold sizes, times and options, never text.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import jaxllm
from jaxllm.config import ConfigError
from jaxllm.messages import PoolingRequest, RequestTimes, TextDelta
from jaxllm.server.engine.streams import InFlight, Observer
from jaxllm.server.metrics import durations

PATH = "/v1/traces"
OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "n")
# Metrics -> attributes of vLLM's traces, in seconds
LATENCIES = {
    "vllm:request_queue_time_seconds": "gen_ai.latency.time_in_queue",
    "vllm:request_prefill_time_seconds": "gen_ai.latency.time_in_model_prefill",
    "vllm:request_decode_time_seconds": "gen_ai.latency.time_in_model_decode",
    "vllm:request_inference_time_seconds": "gen_ai.latency.time_in_model_inference",
}


class Tracing:
    """Where spans go. Spans are sent in batches by a thread of their own, and are dropped when the
    collector does not keep up."""

    def __init__(self, endpoint: str):
        """Raises ConfigError when the endpoint is no HTTP URL, or the extra is not installed."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint:.200} must be the HTTP address of a collector, "
                f"such as http://localhost:4318{PATH}"
            )
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'jaxllm[otel]'"
            ) from None
        if url.path.strip("/"):
            self._endpoint = endpoint
        else:
            self._endpoint = endpoint.rstrip("/") + PATH

    @functools.cached_property
    def _provider(self) -> Any:
        """Made when spans are, with a thread that sends them."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": jaxllm.__version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "jaxllm"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=self._endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider

    def observer(self, after: Observer, model: str) -> Observer:
        """An observer that makes spans, and passes everything on to another."""
        return Spans(after, self._provider.get_tracer("jaxllm", jaxllm.__version__), model)

    def middleware(self, app: Any) -> Any:
        """ASGI that runs each request in the trace of its `traceparent` header."""
        return InTrace(app)

    def close(self) -> None:
        """Send what is left; takes seconds when the collector does not answer."""
        self._provider.shutdown()


class InTrace:
    """Runs requests in the trace of their clients."""

    def __init__(self, app: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        from opentelemetry import context

        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope.get("headers", ())
            if name in (b"traceparent", b"tracestate")
        }
        token = context.attach(self._propagator.extract(carrier, context.Context()))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class Spans(Observer):
    """Makes a span of a request when its last choice ends."""

    def __init__(self, after: Observer, tracer: Any, model: str):
        self._after = after
        self._tracer = tracer
        self._model = model

    def submitted(self, entry: InFlight) -> None:
        """A request was taken."""
        from opentelemetry import context

        entry.trace = _Trace(context.get_current(), time.time_ns())
        self._after.submitted(entry)

    def delta(self, entry: InFlight, delta: TextDelta, now: float) -> None:
        """A delta arrived at `now` (time.monotonic)."""
        self._after.delta(entry, delta, now)
        trace = entry.trace
        if trace is None:
            return
        if trace.first_token is None and delta.token_ids:
            trace.first_token = now - entry.submitted
        trace.times = delta.times or trace.times
        if delta.finish_reason is not None:
            trace.reasons.append(delta.finish_reason)
            if entry.open_choices == 1:
                self._end(entry, trace)

    def aborted(self, entry: InFlight) -> None:
        """A request was aborted."""
        self._after.aborted(entry)
        if entry.trace is not None:
            entry.trace.reasons += ["abort"] * entry.open_choices
            self._end(entry, entry.trace)

    def step_failed(self) -> None:
        """A step of the engine failed."""
        self._after.step_failed()

    def engine_restarted(self) -> None:
        """Another engine process is being started."""
        self._after.engine_restarted()

    def _end(self, entry: InFlight, trace: _Trace) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=trace.context,
            kind=SpanKind.SERVER,
            start_time=trace.began,
            attributes=attributes(entry, trace, self._model),
        )
        if "error" in trace.reasons:
            span.set_status(StatusCode.ERROR)
        span.end()


class _Trace:
    """What is known of a request that runs.

    Attributes:
        context: the client's trace.
        began: nanoseconds since 1970.
        first_token: seconds from the request to its first token.
        times: of its latest choice.
        reasons: for which its choices ended.
    """

    __slots__ = ("began", "context", "first_token", "reasons", "times")

    def __init__(self, context: Any, began: int):
        self.context = context
        self.began = began
        self.first_token: float | None = None
        self.times: RequestTimes | None = None
        self.reasons: list[str] = []


def attributes(entry: InFlight, trace: _Trace, model: str) -> dict[str, Any]:
    """A span's attributes, by the conventions for generative models and under vLLM's names."""
    request = entry.request
    generated = sum(entry.tokens.values())
    prompt: Sequence[int] = request.prompt.tokens
    fields: dict[str, Any] = {
        "gen_ai.operation.name": (
            "embeddings" if isinstance(request, PoolingRequest) else "text_completion"
        ),
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.id,
        "gen_ai.usage.input_tokens": len(prompt),
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.usage.prompt_tokens": len(prompt),
        "gen_ai.usage.completion_tokens": generated,
        "gen_ai.response.finish_reasons": tuple(trace.reasons),
        "gen_ai.latency.e2e": (time.time_ns() - trace.began) / 1e9,
    }
    for name in OPTIONS:
        if (value := getattr(request.params, name, None)) is not None:
            fields[f"gen_ai.request.{name}"] = value
    if trace.first_token is not None:
        fields["gen_ai.latency.time_to_first_token"] = trace.first_token
    if trace.times is not None:
        seconds = durations(trace.times, generated)
        fields |= {name: seconds[metric] for metric, name in LATENCIES.items()}
    return fields
