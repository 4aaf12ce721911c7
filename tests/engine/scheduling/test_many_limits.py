"""The scheduler with the shapes of accelerators, whatever the limits: every step fits a shape."""

from __future__ import annotations

import random

import pytest

from jaxllm.cache.pool import Lifetime, PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.chunk_planner import prefill_budget
from jaxllm.engine.scheduling.plan import Limits, Plan
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_host import Optimist

PAGE = 64


class Load:
    """A scheduler without a device, under a random load for random limits: many short prompts that
    come at once, long ones, and pages that do not last."""

    def __init__(self, seed: int, platform: str, *, batch_invariant: bool = False):
        self.rng = rng = random.Random(seed)
        self.groups = rng.choice((1, 1, 1, 2))
        seqs = max(self.groups, rng.choice((rng.randint(1, 160), rng.randint(1, 1100))))
        tokens = rng.choice((rng.randint(1, 900), rng.randint(1, 9000)))
        tokens = max(tokens, seqs) if batch_invariant else tokens
        build = Buckets.batch_invariant if batch_invariant else Buckets.build
        self.buckets = build(-(-seqs // self.groups), tokens, platform)
        self.limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=4096,
            groups=self.groups,
        )
        index, kind = PrefixIndex(PAGE, b"test"), Lifetime(None, tokens, 1)
        pool = PagePool(rng.choice((60, 90, 400)), PAGE, index, kind)
        self.scheduler = Scheduler(self.limits, [pool], self.buckets)
        if batch_invariant:
            self.scheduler.set_batch_invariant()
        elif rng.random() < 0.7:
            self.scheduler.estimator = Optimist()
        took = {s: 2e-3 + (s.tokens + s.decodes) * 2e-5 for s in self.buckets.extend}
        if rng.random() < 0.6:
            budget = prefill_budget(took, rng.choice((0.01, 0.05, 0.1)))
            self.scheduler.chunk_planner.budget = budget
        self.requests: list[Request] = []
        self.jumped: set[Request] = set()  # whose draw in flight is not used
        self.short = rng.choice((1, 16, 30))  # tokens of most prompts, about
        self.count = rng.randint(1, 120)

    def add(self) -> None:
        """One more request."""
        rng, number = self.rng, len(self.requests)
        short = rng.random() < 0.9
        length = rng.randint(1, 2 * self.short) if short else rng.randint(1, 3700)
        request = Request(
            id=str(number),
            index=0,
            prompt=Prompt([number, *range(length - 1)]),
            params=SamplingParams(),
            seed=0,
            arrival=float(number),
            max_tokens=rng.randint(1, 90),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def run(self) -> None:
        """Until all requests have ended."""
        steps, in_flight = 0, list[Plan]()
        while self.scheduler.has_work or in_flight or len(self.requests) < self.count:
            if len(self.requests) < self.count and self.rng.random() < 0.4:
                for _ in range(min(self.rng.randint(1, 80), self.count - len(self.requests))):
                    self.add()
            plan = self.scheduler.plan()
            self.check(plan)
            if not plan.empty:
                in_flight.append(plan)
            if in_flight and (plan.empty or len(in_flight) > self.groups):
                self.commit(in_flight.pop(0))
            steps += 1
            work = sum(len(r.prompt.tokens) * (1 + r.num_preemptions) + 90 for r in self.requests)
            assert steps < 500 + 3 * work, "requests do not end"
        self.scheduler.check()

    def check(self, plan: Plan) -> None:
        """The step is within the limits and fits a shape."""
        tokens, rows = sum(chunk.length for chunk in plan.chunks), len(plan.decodes)
        assert all(chunk.length > 0 for chunk in plan.chunks)
        assert tokens + rows <= self.limits.max_num_batched_tokens or not plan.chunks
        shape = self.buckets.fit_decode(max(1, rows))
        if plan.chunks:
            shape = self.buckets.fit_extend(tokens, len(plan.chunks), rows)
            assert shape.tokens + shape.decodes <= self.buckets.max_rows
        assert self.buckets.logit_rows(shape) >= rows + len(plan.chunks)

    def commit(self, plan: Plan) -> None:
        """A token of each request that draws one; some are followed by tokens without a draw."""
        for request in plan.emitters:
            if request is None or request.status is Status.FINISHED:
                continue
            if request in self.jumped:
                self.jumped.remove(request)
                continue
            self.append(request, 1)
            if request.status is Status.RUNNING and self.rng.random() < 0.05:
                self.jump(request)

    def jump(self, request: Request) -> None:
        """Tokens that need no draw, instead of the one in flight."""
        room = min(request.max_tokens - len(request.output) - 1, 5)
        room = min(room, self.scheduler.jump_capacity(request))
        if room > 0 and request.num_scheduled_outputs == len(request.output) + 1:
            self.append(request, room)
            self.scheduler.jump(request)
            self.jumped.add(request)

    def append(self, request: Request, count: int) -> None:
        """Give it tokens; the last one ends it."""
        for _ in range(count):
            request.output.append(1)
            self.scheduler.commit_tokens(request, 1)
        if len(request.output) == request.max_tokens:
            self.scheduler.finish(request)


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
def test_every_step_fits_and_every_request_ends_whatever_the_limits(platform: str) -> None:
    for seed in range(40):
        Load(seed, platform).run()


def test_steps_of_an_engine_that_is_batch_invariant_fit_too() -> None:
    for seed in range(20):
        Load(seed, "gpu", batch_invariant=True).run()
