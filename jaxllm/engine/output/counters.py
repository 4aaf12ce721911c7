"""Counters of an engine, and its statistics. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.engine.scheduling.plan import Traffic
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import EngineStats


@dataclass(slots=True)
class Counters:
    """Counts since the engine's start.

    Attributes:
        problem: found by the last self-check, "" for none.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    self_checks: int = 0
    self_check_failures: int = 0
    problem: str = ""

    def snapshot(
        self, scheduler: Scheduler, unscheduled: int, compiles: int, traffic: Traffic
    ) -> EngineStats:
        """A snapshot for metrics.

        Args:
            unscheduled: choices that wait for their grammar.
            compiles: programs compiled after warm-up.
            traffic: pages copied to host memory and back.
        """
        pools, prefix, offload = scheduler.pools, scheduler.pools[0].index, scheduler.offload
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting + unscheduled,
            kv_usage=max(pool.usage for pool in pools),
            prefix_queries=0 if prefix is None else prefix.queries,  # an empty index is false
            prefix_hits=0 if prefix is None else prefix.hits,
            preemptions=scheduler.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            host_usage=offload.host.used / offload.host.num_pages if offload else 0.0,
            pages_saved=traffic.saved,
            pages_loaded=traffic.loaded,
            self_checks=self.self_checks,
            self_check_failures=self.self_check_failures,
            self_check_problem=self.problem,
            compiles_after_warmup=compiles,
            free_pages=sum(pool.free for pool in pools),
            num_pages=sum(pool.num_pages for pool in pools),
        )
