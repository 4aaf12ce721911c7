"""The engine's last two minutes, a sample a second, for whoever begins to watch.

A sample is counts that the server has anyway, so it costs the engine nothing. The latencies of the
last minute are differences of the histograms behind /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.messages import EngineStats
from jaxllm.server.metrics import Histogram

PERIOD = 1.0  # seconds between samples
SAMPLES = 120
WINDOW = 60  # samples over which latencies are taken
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Of EngineStats; what an engine is asked for is missing
FIELDS = (
    *("steps", "prompt_tokens", "generation_tokens", "running", "waiting"),
    *("prefix_hits", "prefix_queries", "kv_usage"),
)


class LatencyWindow:
    """Mean and percentiles of the engines' histograms together over the last WINDOW samples, or
    since the server's start while these saw nothing."""

    def __init__(self, histograms: Sequence[Histogram]):
        self._histograms = histograms
        self._bounds = histograms[0].bounds
        self._past = deque([self._now()], maxlen=WINDOW)

    def _now(self) -> tuple[list[int], float]:
        columns = zip(*(histogram.counts for histogram in self._histograms), strict=True)
        return [sum(column) for column in columns], sum(
            histogram.sum for histogram in self._histograms
        )

    def advance(self) -> None:
        """A period is over."""
        self._past.append(self._now())

    def summary(self) -> dict[str, Any]:
        """The numbers, in seconds; None without any observation. Percentiles are interpolated, as
        Prometheus does; `between` has the bounds within which each of them lies for certain."""
        now = self._now()
        counts, total = self._past[0]
        recent = [after - before for after, before in zip(now[0], counts, strict=True)]
        seconds = now[1] - total
        is_recent = any(recent)
        if not is_recent:
            recent, seconds = now
        count = sum(recent)
        quantiles = {name: quantile(self._bounds, recent, q) for name, q in QUANTILES.items()}
        between = {name: bucket(self._bounds, recent, q) for name, q in QUANTILES.items()}
        mean = None
        if count:
            mean = seconds / count
        return {"count": count, "recent": is_recent, "mean": mean, **quantiles, "between": between}


class Recorder:
    """Takes the samples. `stats` are those of all engines now."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        first_token: Sequence[Histogram],
        between_tokens: Sequence[Histogram],
    ):
        self._stats = stats
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._task: asyncio.Task[None] | None = None
        self.first_token = LatencyWindow(first_token)
        self.between_tokens = LatencyWindow(between_tokens)

    def start(self) -> None:
        """Take samples from now on, in the running event loop."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """Take no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def sample(self) -> None:
        """Take one."""
        stats = self._stats()
        self._samples.append(
            {"time": time.monotonic(), **{name: getattr(stats, name) for name in FIELDS}}
        )
        self.first_token.advance()
        self.between_tokens.advance()

    def columns(self) -> dict[str, list[float]]:
        """The samples, oldest first: a list for each field."""
        return {name: [sample[name] for sample in self._samples] for name in ("time", *FIELDS)}

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(PERIOD)


def place(counts: Sequence[int], q: float) -> tuple[int, float] | None:
    """The bucket with quantile `q` and how far into it that lies; None when all are empty."""
    rank = q * sum(counts)
    below = 0
    for number, count in enumerate(counts):
        if count and below + count >= rank:
            return number, (rank - below) / count
        below += count
    return None


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Quantile `q` of a histogram whose last bucket has no upper bound, interpolated; None when it
    is empty."""
    where = place(counts, q)
    if where is None:
        return None
    number, share = where
    low, high = limits(bounds, number)
    if high is None:
        return low
    return low + (high - low) * share


def bucket(
    bounds: Sequence[float], counts: Sequence[int], q: float
) -> tuple[float, float | None] | None:
    """The bounds of the bucket with quantile `q`, which are all that a histogram knows of it; the
    last bucket has no upper one."""
    where = place(counts, q)
    if where is None:
        return None
    number, _ = where
    return limits(bounds, number)


def limits(bounds: Sequence[float], number: int) -> tuple[float, float | None]:
    """The bounds of a bucket; the last has no upper one."""
    return (0.0, *bounds)[number], (*bounds, None)[number]
