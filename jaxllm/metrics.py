"""Metrics of an engine under vLLM's names, and our own under `jaxllm:`. Imports no jax.

`LLM.get_metrics` returns them in the shape of vLLM's `vllm.v1.metrics.reader`; the server's
`/metrics` exposes the same names, to which Prometheus adds `_total` for counters.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.messages import EngineStats

# Name: (help, field of EngineStats)
GAUGES = {
    "vllm:num_requests_running": ("Choices that generate.", "running"),
    "vllm:num_requests_waiting": ("Choices that wait.", "waiting"),
    "vllm:kv_cache_usage_perc": ("KV pages in use, 0 to 1.", "kv_usage"),
    "jaxllm:missing_programs": (
        "Step programs that are still made behind /ready.",
        "missing_programs",
    ),
    "jaxllm:host_cache_usage": ("Pages of host memory in use, 0 to 1.", "host_usage"),
}
COUNTERS = {
    "vllm:prompt_tokens": ("Prompt tokens processed.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        "prefix_queries",
    ),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hits"),
    "vllm:num_preemptions": ("Preemptions.", "preemptions"),
    "jaxllm:compiles_after_warmup": (
        "Programs compiled while serving; should stay 0.",
        "compiles_after_warmup",
    ),
    "jaxllm:late_programs": ("Step programs made behind /ready.", "late_programs"),
    "jaxllm:self_checks": (
        "Checks of pages, slots and cached prefixes by an idle engine.",
        "self_checks",
    ),
    "jaxllm:self_check_failures": (
        "Checks that found an inconsistency; should stay 0.",
        "self_check_failures",
    ),
    "jaxllm:pages_saved": ("KV pages copied to host memory.", "pages_saved"),
    "jaxllm:pages_loaded": ("KV pages brought back from host memory.", "pages_loaded"),
    "jaxllm:engine_steps": ("Steps of the engine.", "steps"),
}


@dataclass
class Metric:
    """One metric; several may share a name and differ in `labels`."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


def engine_metrics(stats: EngineStats, model_name: str) -> list[Metric]:
    """The metrics of one engine."""
    labels = {"model_name": model_name, "engine": "0"}
    gauges: list[Metric] = [
        Gauge(name, dict(labels), float(getattr(stats, field)))
        for name, (_, field) in GAUGES.items()
    ]
    return gauges + [
        Counter(name, dict(labels), getattr(stats, field)) for name, (_, field) in COUNTERS.items()
    ]
