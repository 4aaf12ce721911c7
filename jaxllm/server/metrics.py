"""Prometheus metrics under vLLM's names, so that stock dashboards work, and our own under
`jaxllm:`.

A scrape reads gauges and counters from the engine's latest snapshot. Histograms are plain lists,
because every token updates them. Label values come from closed sets: the served name, finish
reasons, refusal reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from jaxllm.messages import EngineStats, RequestTimes, TextDelta
from jaxllm.metrics import COUNTERS, GAUGES
from jaxllm.server.engine.streams import InFlight, Observer

FINISH_REASONS = ("stop", "length", "abort", "error", "tool_calls")
REFUSALS = ("queue_full", "grammar_queue_full", "engine_down", "invalid")

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_WHOLE = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Histogram:
    """Counts per bucket; `observe` costs a bisection."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) pairs in Prometheus's form."""
        rows, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return rows


class Metrics(Observer, Collector):
    """The observer of an EngineClient, and its scrape. Each server has its own registry."""

    def __init__(
        self, model_name: str, max_model_len: int, version: str, stats: Callable[[], EngineStats]
    ):
        self._labels = [model_name, "0"]
        self._version, self._stats = version, stats
        lengths = one_two_five(max_model_len)
        self.histograms: dict[str, tuple[str, Histogram]] = {
            "vllm:time_to_first_token_seconds": ("Arrival to first token.", Histogram(_FIRST)),
            "vllm:inter_token_latency_seconds": (
                "Time between tokens of a choice.",
                Histogram(_GAP),
            ),
            "vllm:request_time_per_output_token_seconds": (
                "Mean time per token after the first.",
                Histogram(_GAP),
            ),
            "vllm:e2e_request_latency_seconds": ("Arrival to last token.", Histogram(_WHOLE)),
            "vllm:request_queue_time_seconds": ("Time waiting to be scheduled.", Histogram(_WHOLE)),
            "vllm:request_inference_time_seconds": ("Scheduled to last token.", Histogram(_WHOLE)),
            "vllm:request_prefill_time_seconds": ("Scheduled to first token.", Histogram(_WHOLE)),
            "vllm:request_decode_time_seconds": ("First to last token.", Histogram(_WHOLE)),
            "vllm:request_prompt_tokens": ("Prompt tokens.", Histogram(lengths)),
            "vllm:request_generation_tokens": ("Generated tokens.", Histogram(lengths)),
            "vllm:request_max_num_generation_tokens": (
                "Generated tokens of the longest choice of a request.",
                Histogram(lengths),
            ),
            "vllm:request_params_max_tokens": ("max_tokens of requests.", Histogram(lengths)),
            "vllm:request_params_n": ("n of requests.", Histogram(_CHOICES)),
        }
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.unknown_fields = self._failed_steps = self._restarts = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        """The reply to a scrape."""
        return generate_latest(self._registry)

    def delta(self, entry: InFlight, delta: TextDelta, now: float) -> None:
        """A delta arrived at `now` (time.monotonic)."""
        tokens = len(delta.token_ids)
        if tokens:
            last = entry.last_delta.get(delta.index)
            if last is None:
                self._observe("vllm:time_to_first_token_seconds", now - entry.submitted)
            else:
                self.histograms["vllm:inter_token_latency_seconds"][1].observe(
                    (now - last) / tokens, tokens
                )
            entry.last_delta[delta.index] = now
            entry.tokens[delta.index] = entry.tokens.get(delta.index, 0) + tokens
        if delta.finish_reason is not None:
            self._finish(entry, delta, now)

    def aborted(self, entry: InFlight) -> None:
        """A request was aborted."""
        self._finished["abort"] += entry.open_choices

    def step_failed(self) -> None:
        """A step of the engine failed."""
        self._failed_steps += 1

    def engine_restarted(self) -> None:
        """Another engine process is being started."""
        self._restarts += 1

    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self._refused[reason if reason in REFUSALS else "invalid"] += 1

    def _finish(self, entry: InFlight, delta: TextDelta, now: float) -> None:
        reason = delta.finish_reason if delta.finish_reason in FINISH_REASONS else "error"
        self._finished[reason] += 1
        generated = entry.tokens.get(delta.index, 0)
        self._observe("vllm:e2e_request_latency_seconds", now - entry.submitted)
        self._observe("vllm:request_prompt_tokens", len(entry.request.prompt_token_ids))
        self._observe("vllm:request_generation_tokens", generated)
        if entry.open_choices == 1:  # the last choice of the request
            self._observe(
                "vllm:request_max_num_generation_tokens", max(entry.tokens.values(), default=0)
            )
            self._observe("vllm:request_params_n", entry.request.params.n)
            self._observe("vllm:request_params_max_tokens", entry.request.params.max_tokens or 0)
        if delta.times is not None:
            self._times(delta.times, generated)

    def _times(self, times: RequestTimes, generated: int) -> None:
        decode = max(0.0, times.last_token - times.first_token)
        self._observe("vllm:request_queue_time_seconds", max(0.0, times.scheduled - times.arrival))
        self._observe(
            "vllm:request_prefill_time_seconds", max(0.0, times.first_token - times.scheduled)
        )
        self._observe("vllm:request_decode_time_seconds", decode)
        self._observe(
            "vllm:request_inference_time_seconds", max(0.0, times.last_token - times.scheduled)
        )
        if generated > 1:
            self._observe("vllm:request_time_per_output_token_seconds", decode / (generated - 1))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name][1].observe(value)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        """prometheus_client's hook."""
        stats, names = self._stats(), ["model_name", "engine"]
        for name, (help, field) in GAUGES.items():
            gauge = GaugeMetricFamily(name, help, labels=names)
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        counts = {name: (help, getattr(stats, field)) for name, (help, field) in COUNTERS.items()}
        counts |= {
            "jaxllm:unknown_request_fields": (
                "Fields of requests that this server does not know.",
                self.unknown_fields,
            ),
            "jaxllm:engine_step_failures": ("Steps that failed.", self._failed_steps),
            "jaxllm:engine_restarts": ("Restarts of the engine process.", self._restarts),
        }
        for name, (help, count) in counts.items():
            counter = CounterMetricFamily(name, help, labels=names)
            counter.add_metric(self._labels, count)
            yield counter
        yield self._counted(
            "vllm:request_success",
            "Finished choices.",
            "finished_reason",
            self._finished,
            FINISH_REASONS,
        )
        yield self._counted(
            "vllm:admission_rejections", "Requests not admitted.", "reason", self._refused, REFUSALS
        )
        for name, (help, kept) in self.histograms.items():
            family = HistogramMetricFamily(name, help, labels=names)
            family.add_metric(self._labels, kept.cumulative(), kept.sum)
            yield family
        info = GaugeMetricFamily(
            "jaxllm:build_info", "Always 1; the labels say what runs.", labels=[*names, "version"]
        )
        info.add_metric([*self._labels, self._version], 1)
        yield info

    def _counted(
        self, name: str, help: str, label: str, counts: Counter[str], values: tuple[str, ...]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=["model_name", "engine", label])
        for value in values:
            family.add_metric([*self._labels, value], counts[value])
        return family


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `limit`."""
    bounds: list[float] = []
    scale = 1
    while scale <= limit:
        bounds += [scale * step for step in (1, 2, 5) if scale * step <= limit]
        scale *= 10
    return tuple(bounds)
