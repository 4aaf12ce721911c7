"""Prometheus metrics under vLLM's names, so that stock dashboards work, and our own under
`jaxllm:`.

A scrape reads gauges and counters from the engine's latest snapshot. Histograms are plain lists,
because every token updates them. Label values come from closed sets: the served name, finish
reasons, refusal reasons.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from jaxllm.config import Resolved
from jaxllm.messages import PREFIX_MISSES, STEP_TOKENS, EngineStats, RequestTimes, TextDelta
from jaxllm.metrics import COUNTERS, GAUGES
from jaxllm.server.engine.streams import InFlight, Observer

# Names of older releases that routers still read, beside those of today
OLD_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
}
NO_ADAPTERS = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
FINISH_REASONS = ("stop", "length", "abort", "error")
LABELS = ["model_name", "engine"]
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep
REFUSALS = ("queue_full", "grammar_queue_full", "engine_down", "invalid")

# Upper bounds, in seconds but for the last
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
    5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
CHOICE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50, 100)

type Metric = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


class Histogram:
    """Counts per bucket; `observe` costs a bisection."""

    def __init__(self, help: str, bounds: tuple[float, ...]):
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """As `cumulative`."""
        return cumulative(self.bounds, self.counts)


def cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """(upper bound, observations up to it) pairs in Prometheus's form, from those in each
    bucket."""
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


def _histograms(lengths: tuple[float, ...]) -> dict[str, Histogram]:
    """Empty ones by name; those of tokens have the bounds `lengths`."""
    return {
        "vllm:time_to_first_token_seconds": Histogram(
            "Arrival to first token.", FIRST_TOKEN_SECONDS
        ),
        "vllm:inter_token_latency_seconds": Histogram(
            "Time between tokens of a choice.", TOKEN_SECONDS
        ),
        "vllm:request_time_per_output_token_seconds": Histogram(
            "Mean time per token after the first.", TOKEN_SECONDS
        ),
        "vllm:e2e_request_latency_seconds": Histogram("Arrival to last token.", REQUEST_SECONDS),
        "vllm:request_queue_time_seconds": Histogram(
            "Time waiting to be scheduled.", REQUEST_SECONDS
        ),
        "vllm:request_inference_time_seconds": Histogram(
            "Scheduled to last token.", REQUEST_SECONDS
        ),
        "vllm:request_prefill_time_seconds": Histogram(
            "Scheduled to first token.", REQUEST_SECONDS
        ),
        "vllm:request_decode_time_seconds": Histogram("First to last token.", REQUEST_SECONDS),
        "vllm:request_prompt_tokens": Histogram("Prompt tokens.", lengths),
        "vllm:request_generation_tokens": Histogram("Generated tokens.", lengths),
        "vllm:request_max_num_generation_tokens": Histogram(
            "Generated tokens of the longest choice of a request.", lengths
        ),
        "vllm:request_prefill_kv_computed_tokens": Histogram(
            "Prompt tokens that were not in the prefix cache.", lengths
        ),
        "vllm:request_num_preemptions": Histogram("Preemptions of a choice.", PREEMPTIONS),
        "vllm:request_params_max_tokens": Histogram("max_tokens of requests.", lengths),
        "vllm:request_params_n": Histogram("n of requests.", CHOICE_COUNTS),
    }


class Metrics(Observer, Collector):
    """The observer of an EngineClient, and what a scrape tells of it."""

    def __init__(
        self,
        model_name: str,
        resolved: Resolved,
        version: str,
        stats: Callable[[], EngineStats],
        engine: int = 0,
    ):
        """`engine` is its number among those of the model."""
        self._labels = [model_name, str(engine)]
        self._version = version
        self._resolved = resolved
        self._stats = stats
        self._histograms = _histograms(one_two_five(resolved.max_model_len))
        # Observed at every step
        self.first_token = self._histograms["vllm:time_to_first_token_seconds"]
        self.between_tokens = self._histograms["vllm:inter_token_latency_seconds"]
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self.unknown_fields = self._failed_steps = self._restarts = self._cached_tokens = 0

    def delta(self, entry: InFlight, delta: TextDelta, now: float) -> None:
        """A delta arrived at `now` (time.monotonic)."""
        tokens = len(delta.token_ids)
        if tokens:
            last = entry.last_delta.get(delta.index)
            if not entry.last_delta:  # of no choice
                self._cached_tokens += delta.num_cached_tokens
            if last is None:
                self.first_token.observe(now - entry.submitted)
            else:
                self.between_tokens.observe((now - last) / tokens, tokens)
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
        """Count a choice that has ended, and its request with the last of them."""
        reason = "error"
        if delta.finish_reason in FINISH_REASONS:
            reason = delta.finish_reason
        self._finished[reason] += 1
        if delta.prefix_miss in PREFIX_MISSES:
            self._misses[delta.prefix_miss] += 1
        params = entry.request.params
        generated = entry.tokens.get(delta.index, 0)
        values: dict[str, float] = {
            "vllm:e2e_request_latency_seconds": now - entry.submitted,
            "vllm:request_prompt_tokens": len(entry.request.prompt.tokens),
            "vllm:request_generation_tokens": generated,
        }
        if entry.open_choices == 1:
            values |= {
                "vllm:request_max_num_generation_tokens": max(entry.tokens.values(), default=0),
                "vllm:request_prefill_kv_computed_tokens": len(entry.request.prompt.tokens)
                - delta.num_cached_tokens,
                "vllm:request_params_n": params.n,
                "vllm:request_params_max_tokens": params.max_tokens or 0,
            }
        if delta.times is not None:
            values |= durations(delta.times, generated)
            values["vllm:request_num_preemptions"] = delta.times.num_preemptions
        for name, value in values.items():
            self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's hook."""
        stats = self._stats()
        for name, (help, field) in with_old_names(GAUGES):
            yield self._family(GaugeMetricFamily, name, help, [((), getattr(stats, field))])
        counters = [
            (name, help, getattr(stats, field)) for name, (help, field) in with_old_names(COUNTERS)
        ]
        counters += [
            (
                "jaxllm:unknown_request_fields",
                "Fields of requests that this server does not know.",
                self.unknown_fields,
            ),
            (
                "vllm:prompt_tokens_cached",
                "Prompt tokens of requests that were in the prefix cache.",
                self._cached_tokens,
            ),
            ("jaxllm:engine_step_failures", "Steps that failed.", self._failed_steps),
            ("jaxllm:engine_restarts", "Restarts of the engine process.", self._restarts),
        ]
        for name, help, count in counters:
            yield self._family(CounterMetricFamily, name, help, [((), count)])
        finished = [((reason,), self._finished[reason]) for reason in FINISH_REASONS]
        name = "vllm:request_success"
        help = "Finished choices."
        yield self._family(CounterMetricFamily, name, help, finished, "finished_reason")
        states = [
            ((name,), float(stats.sleep_level == level)) for level, name in enumerate(SLEEP_STATES)
        ]
        name = "vllm:engine_sleep_state"
        help = "Whether the engine sleeps, and how deeply."
        yield self._family(GaugeMetricFamily, name, help, states, "sleep_state")
        waiting = [(("capacity",), stats.waiting - stats.deferred), (("deferred",), stats.deferred)]
        name = "vllm:num_requests_waiting_by_reason"
        help = "Choices that wait, and for what."
        yield self._family(GaugeMetricFamily, name, help, waiting, "reason")
        refused = [((reason,), self._refused[reason]) for reason in REFUSALS]
        name = "vllm:admission_rejections"
        help = "Requests not admitted."
        yield self._family(CounterMetricFamily, name, help, refused, "reason")
        misses = [((reason,), self._misses[reason]) for reason in PREFIX_MISSES]
        name = "jaxllm:prefix_misses"
        help = "Prompts whose rest was not in the prefix cache."
        yield self._family(CounterMetricFamily, name, help, misses, "reason")
        for name, histogram in self._histograms.items():
            yield self._histogram(name, histogram.help, histogram.cumulative(), histogram.sum)
        steps = cumulative(STEP_TOKENS, stats.step_tokens)
        tokens = stats.computed_tokens
        name = "vllm:iteration_tokens_total"
        help = "Tokens that a step computes."
        yield self._histogram(name, help, steps, tokens)
        yield self._info("jaxllm:build_info", "what runs", {"version": self._version})
        yield self._info("vllm:cache_config_info", "the KV cache", cache_config(self._resolved))
        # Its value is when it was true: of two replies a gateway takes the newer
        yield self._info(
            "vllm:lora_requests_info", "adapters in use", NO_ADAPTERS, math.floor(time.time())
        )

    def _info(self, name: str, meaning: str, labels: dict[str, str], value: float = 1) -> Metric:
        """A metric that tells by its labels."""
        values = [(tuple(labels.values()), value)]
        return self._family(GaugeMetricFamily, name, f"The labels say {meaning}.", values, *labels)

    def _histogram(
        self, name: str, help: str, buckets: list[tuple[str, float]], sum: float
    ) -> Metric:
        family = HistogramMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, buckets, sum)
        return family

    def _family(
        self,
        family_type: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        help: str,
        values: Iterable[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        """A metric with its values by the values of `labels`."""
        family = family_type(name, help, labels=[*LABELS, *labels])
        for label_values, value in values:
            family.add_metric([*self._labels, *label_values], value)
        return family


def with_old_names(table: dict[str, tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The rows of a table of metrics, those with an older name under both."""
    for name, row in table.items():
        yield name, row
        if name in OLD_NAMES:
            yield OLD_NAMES[name], row


def cache_config(resolved: Resolved) -> dict[str, str]:
    """Labels of `vllm:cache_config_info`, by which gateways turn usage into tokens."""
    return {
        "block_size": str(resolved.page_size),
        "num_gpu_blocks": str(resolved.num_pages),
        "cache_dtype": resolved.kv_dtype,
        "enable_prefix_caching": str(resolved.enable_prefix_caching),
    }


class Merged(Collector):
    """The metrics of several engines: each name once, with the samples of all."""

    def __init__(self, engines: Iterable[Metrics]):
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's hook."""
        families: dict[str, Metric] = {}
        for metric in (metric for engine in self._engines for metric in engine.collect()):
            families.setdefault(metric.name, metric)
            if families[metric.name] is not metric:
                families[metric.name].samples += metric.samples
        yield from families.values()


def exposition(engines: Iterable[Metrics]) -> bytes:
    """The reply to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged(engines))
    return generate_latest(registry)


def load_metrics(engines: Sequence[EngineStats]) -> dict[str, float]:
    """The load as gateways weigh it, by ORCA's names of named metrics: of several engines the
    fullest cache, and all requests."""
    return {
        "kv_cache_usage_perc": max(stats.kv_usage for stats in engines),
        "num_requests_waiting": sum(stats.waiting for stats in engines),
        "num_requests_running": sum(stats.running for stats in engines),
    }


def durations(times: RequestTimes, generated: int) -> dict[str, float]:
    """Seconds of each part of a choice's life, by metric."""
    decode = max(0.0, times.last_token - times.first_token)
    seconds = {
        "vllm:request_queue_time_seconds": max(0.0, times.scheduled - times.arrival),
        "vllm:request_prefill_time_seconds": max(0.0, times.first_token - times.scheduled),
        "vllm:request_decode_time_seconds": decode,
        "vllm:request_inference_time_seconds": max(0.0, times.last_token - times.scheduled),
    }
    if generated > 1:
        seconds["vllm:request_time_per_output_token_seconds"] = decode / (generated - 1)
    return seconds


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `limit`."""
    steps = (step * 10**digits for digits in range(len(str(limit))) for step in (1, 2, 5))
    return tuple(bound for bound in steps if bound <= limit)
