"""Counts of an engine since its start. Imports no jax."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from jaxllm.engine.output.step_observer import StepObserver
from jaxllm.engine.scheduling.plan import Plan, Traffic
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import STEP_TOKENS, EngineStats


@dataclass(slots=True)
class Counters(StepObserver):
    """Counts since the engine's start.

    Attributes:
        computed_tokens: of all steps.
        step_tokens: steps by their tokens, as in `EngineStats`.
        problem: found by the last self-check, "" for none.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    self_checks: int = 0
    self_check_failures: int = 0
    problem: str = ""

    def step_launched(self, plan: Plan) -> None:
        """Count a step and the tokens that it computes."""
        tokens = plan.tokens
        self.steps += 1
        self.computed_tokens += tokens
        self.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1

    def snapshot(
        self,
        scheduler: Scheduler,
        pending: int,
        compiles: int,
        late: tuple[int, int],
        traffic: Traffic,
        sleep_level: int,
    ) -> EngineStats:
        """A snapshot for metrics.

        Args:
            pending: choices that wait for their grammar.
            compiles: programs compiled after warm-up.
            late: programs made behind `/ready`, and those yet to be made.
            traffic: pages copied to host memory and back.
            sleep_level: 0 while the engine is awake.
        """
        pools = scheduler.pools
        prefix = pools[0].index
        offload = scheduler.offload
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting + pending,
            deferred=pending,
            kv_usage=max(pool.usage for pool in pools),
            prefix_queries=0 if prefix is None else prefix.queries,  # an empty index is false
            prefix_hits=0 if prefix is None else prefix.hits,
            preemptions=scheduler.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            computed_tokens=self.computed_tokens,
            step_tokens=tuple(self.step_tokens),
            host_usage=offload.host.used / offload.host.num_pages if offload else 0.0,
            pages_saved=traffic.saved,
            pages_loaded=traffic.loaded,
            self_checks=self.self_checks,
            self_check_failures=self.self_check_failures,
            self_check_problem=self.problem,
            compiles_after_warmup=compiles,
            late_programs=late[0],
            missing_programs=late[1],
            free_pages=sum(pool.free for pool in pools),
            num_pages=sum(pool.num_pages for pool in pools),
            sleep_level=sleep_level,
        )
