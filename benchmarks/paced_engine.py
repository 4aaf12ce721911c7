"""A server over an engine without a model: once enough streams wait, each gets a token a step, at a
fixed rate, out of a text.

    python -m benchmarks.paced_engine serve ARGS…

starts the server; without `serve` this is its engine process. `PACED`, a JSON object in the
environment, says what it does; see `Plan`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

from jaxllm.config import EngineConfig, Resolved
from jaxllm.messages import EngineStats, GenerateRequest, RequestTimes, TextDelta
from jaxllm.server.engine.process import main

TURN_SECONDS = 0.05
RESOLVED = Resolved(
    model_dir="",
    model_type="none",
    dtype="float32",
    kv_dtype="float32",
    max_model_len=1 << 16,
    page_size=16,
    group_pages=(1 << 12,),
    max_num_seqs=1024,
    max_num_batched_tokens=1024,
    max_num_queued_reqs=1024,
    vocab_size=1024,
    tensor_parallel_size=1,
    max_logprobs=20,
    logprobs_mode="raw_logprobs",
    enable_prefix_caching=True,
    async_scheduling=False,
    scheduling_policy="fcfs",
    preemption_mode="recompute",
    host_pages=0,
    host_cached_pages=0,
    moved_pages=0,
    staged_pages=0,
    attention_backend="none",
    attention_reason="there is no model",
)


@dataclass
class Plan:
    """What the engine does.

    Attributes:
        streams: that it waits for.
        rate: tokens a second, of all streams.
        tokens: of each stream, as texts.
        turns: of how many servers that stream one after the other.
        turn: which of them is this one's.
    """

    streams: int
    rate: float
    tokens: list[str]
    turns: int
    turn: int

    def seconds_to_turn(self, now: float) -> float:
        """How long the others have their turns."""
        place = (now / TURN_SECONDS - self.turn) % self.turns
        return (self.turns - place) * TURN_SECONDS if place >= 1 else 0.0


@dataclass
class Job:
    """A request, and how many tokens it has."""

    request: GenerateRequest
    at: int = 0


class PacedEngine:
    """What `EngineProcess` needs of an engine."""

    awaits_grammar = False
    wait_seconds = 0.0

    def __init__(self, config: EngineConfig):
        self.resolved = replace(RESOLVED, model_dir=config.model)
        self.runner = SimpleNamespace(leave=lambda: None)  # no device is told of the end
        self._plan = Plan(**json.loads(os.environ["PACED"]))
        self._jobs: dict[str, Job] = {}
        self._stats = EngineStats()
        self._due = 0.0
        self._began = False

    @property
    def has_work(self) -> bool:
        return bool(self._jobs) and (self._began or len(self._jobs) >= self._plan.streams)

    def make_late(self, made: Callable[[], None]) -> None:
        """There are no programs."""

    def when_built(self, heard: Callable[[], None]) -> None:
        """There are no grammars."""

    def self_check(self) -> None:
        """There are no pages."""

    def add(self, request: GenerateRequest) -> None:
        """Takes a request."""
        self._jobs[request.id] = Job(request)

    def abort(self, id: str) -> None:
        """Forgets a request."""
        self._jobs.pop(id, None)

    def step(self) -> list[TextDelta]:
        """A token of each request, not before it is due."""
        self._began = True
        self._due = max(self._due + len(self._jobs) / self._plan.rate, time.time())
        time.sleep(max(0.0, self._due - time.time()))
        time.sleep(self._plan.seconds_to_turn(time.time()))
        deltas = [self._advance(job) for job in self._jobs.values()]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self._jobs[delta.id]
        self._began = bool(self._jobs)
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + 1,
            generation_tokens=self._stats.generation_tokens + len(deltas),
        )
        return deltas

    def stats(self) -> EngineStats:
        """Its counters."""
        return replace(self._stats, running=len(self._jobs))

    def _advance(self, job: Job) -> TextDelta:
        text = self._plan.tokens[job.at]
        job.at += 1
        delta = TextDelta(id=job.request.id, index=0, token_ids=[1], text=text)
        if job.at == len(self._plan.tokens):
            now = time.time()
            delta.finish_reason = "stop"
            delta.times = RequestTimes(
                arrival=job.request.arrival, scheduled=now, first_token=now, last_token=now
            )
        return delta


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        from jaxllm.server.__main__ import main as serve

        command = (sys.executable, "-m", "benchmarks.paced_engine")
        raise SystemExit(serve(sys.argv[2:], command=command))
    raise SystemExit(main(factory=lambda config, on_phase: PacedEngine(config)))
