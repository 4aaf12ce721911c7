"""What must hold of every plan and at the end: the checks of the fake loop."""

from __future__ import annotations

from collections import deque
from typing import Any

from jaxllm.cache.pool import PagePool
from jaxllm.engine.output.beam_requests import BeamRequests
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Chunk, Plan, spans
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from tests.engine.fake_device import generate, search_alone


class LoopChecks:
    """The checks of `Loop`, which has these attributes."""

    setup: Any
    scheduler: Scheduler
    buckets: Buckets
    pools: list[PagePool]
    requests: list[Request]
    stop_at: dict[Request, int | None]
    in_flight: deque[tuple[Plan, list[list[int]]]]
    aborted: set[Request]
    sent_back: set[Request]
    scored: dict[Request, int]
    found: dict[str, tuple[BeamRequests, list[int]]]
    first_tokens: list[int]
    reached: dict[Request, int]

    def check(self, plan: Plan, running_before: list[Request]) -> None:
        """What holds of every plan."""
        setup, scheduler = self.setup, self.scheduler
        scheduler.check()
        running = sorted(
            (r for r in self.requests if r.status is Status.RUNNING), key=lambda r: r.order
        )
        assert scheduler.running == len(running) <= setup.max_num_seqs
        assert plan.tokens <= setup.max_num_batched_tokens
        self.sent_back -= set(running)
        # The beams of a search have one place together.
        waiting = [
            r.order[:2]
            for r in self.requests
            if r.status is Status.WAITING and r not in self.sent_back
        ]
        fcfs = setup.policy == "fcfs"
        assert not fcfs or all(r.order[:2] <= place for r in running for place in waiting), (
            "a newer request overtook a waiting one"
        )
        rows = [row.request for row in (*plan.decodes, *plan.chunks)]
        assert all(r.slot % setup.groups == plan.group for r in rows), "groups run together"
        assert len(rows) <= setup.step_seqs
        assert len(set(rows)) == len(rows) and set(rows) <= set(running)
        self._check_shape(plan)
        if setup.batch_invariant:
            assert not (plan.decodes and plan.chunks), "prompts and decodes run together"
            assert not plan.preempted or any(r.is_beam for r in self.requests), (
                "a request was preempted"
            )
        for request in plan.preempted:
            assert all(r.order < request.order for r in running), (
                "a request was preempted for one behind it"
            )
            assert request.status is Status.WAITING and not request.pages and request.slot == -1
            self.reached.pop(request, None)
        if plan.preempted:
            assert set(running) <= set(running_before), (
                "a request was admitted in a step that preempted"
            )
        for decode in plan.decodes:
            request = decode.request
            self._progress(request, decode.first, 1)
            assert decode.first == len(request.prompt.tokens) + request.num_scheduled_outputs - 2
            assert 1 <= decode.count <= 1 + setup.drafts
            # Where its inputs may go: the first one may be any of the drafts in flight
            pages = range(
                decode.first // setup.page_size, self.pools[0].pages_for(request.computed)
            )
            assert all(w.column in pages for w in plan.table_writes if w.slot == request.slot), (
                "a decode gets pages that it does not write"
            )
        for chunk in plan.chunks:
            self._check_chunk(chunk)
        for request in running:
            assert request.num_scheduled_outputs <= request.max_tokens
            needed = max(request.computed, request.prefill_end)
            # Pages for drafts that were rejected are kept
            drafts = setup.decoded if setup.drafts else 0
            for pool, table in zip(self.pools, request.tables, strict=True):
                assert len(table.pages) * setup.page_size - needed < setup.page_size + drafts, (
                    "more than a page is wasted"
                )
                # Where a beam may wait for its turn
                turns = setup.batch_invariant or setup.groups > 1
                whole = pool.lifetime.window is None and not turns
                held = needed if whole else request.computed
                assert len(table.pages) * setup.page_size >= min(held, request.kv_end)
                assert len(table.resident) <= pool.max_resident(needed + drafts), (
                    "pages are held that nobody sees"
                )
        if running:
            oldest = running[0]
            # Decodes go first: before a beam's token, which is a chunk, and before who waited for
            # pages beside them.
            full = (oldest.is_beam or setup.host_pages) and len(
                plan.decodes
            ) == setup.max_num_batched_tokens
            ended = oldest.num_scheduled_outputs == oldest.max_tokens
            full = full or (setup.batch_invariant and rows)  # it is not its turn
            full = full or oldest.slot % setup.groups != plan.group
            assert oldest in rows or oldest.pages_in_transit or full or ended, (
                "the oldest request stands still"
            )
        else:
            assert not scheduler.waiting or self.in_flight, "requests wait though nothing runs"

    def _check_scores(self, plan: Plan) -> None:
        """Every token of a prompt that is to be scored is computed and scored once, before the
        first token is drawn."""
        for span in spans(plan):
            assert self.scored.get(span.request, 0) == span.start, (
                "a token is scored twice or left out"
            )
            self.scored[span.request] = span.stop
        plan.mark_started(0.0)
        for request in plan.emitters:
            assert (
                request is None
                or self.scored.get(request, 0) == request.score_end == request.scored
            )

    def _check_shape(self, plan: Plan) -> None:
        if plan.chunks:
            tokens = sum(c.length for c in plan.chunks)
            shape = self.buckets.fit_extend(tokens, len(plan.chunks), len(plan.decodes))
            assert (
                shape.tokens >= tokens
                and shape.chunks >= len(plan.chunks)
                and shape.decodes >= len(plan.decodes)
            )
        elif plan.decodes:
            assert self.buckets.fit_decode(len(plan.decodes)) >= len(plan.decodes)

    def _check_chunk(self, chunk: Chunk) -> None:
        request, end = chunk.request, chunk.start + chunk.length
        assert chunk.length > 0
        if request not in self.reached:
            borrowed = request.kept == request.num_tokens and chunk.start == request.kept - 1
            assert borrowed or chunk.start % self.setup.page_size == 0, (
                "a life starts at a page, or after all tokens of another"
            )
            self.reached[request] = chunk.start
        self._progress(request, chunk.start, chunk.length)
        assert chunk.final == (end == request.num_tokens)
        if (
            chunk.final
            and not request.output
            and self.setup.policy == "fcfs"
            and not self.setup.host_pages
            and self.setup.groups == 1  # another group may have shorter prompts
        ):
            assert not self.first_tokens or self.first_tokens[-1] < int(request.id), (
                "a newer request got its first token first"
            )
            self.first_tokens.append(int(request.id))

    def _progress(self, request: Request, start: int, length: int) -> None:
        assert self.reached[request] == start, "a position is computed twice or left out"
        self.reached[request] = start + length

    def check_ended(self) -> None:
        """Everything came back, and every request gave what it gives alone."""
        self.scheduler.check()
        for pool in self.pools:
            pool.check()
            assert pool.free == pool.num_pages and pool.usage == 0
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        for beams, prompt in self.found.values():
            assert beams.search.finished == search_alone(prompt, beams.search.rules)
        for request in (r for r in self.requests if not r.is_beam):
            self._check_output(request)

    def forget_ended(self) -> None:
        """Check requests that have ended, and drop them."""
        for request in [request for request in self.requests if request.status is Status.FINISHED]:
            self._check_output(request)
            self.requests.remove(request)
            self.aborted.discard(request)
            self.reached.pop(request, None)
            del self.stop_at[request]

    def _check_output(self, request: Request) -> None:
        expected = generate(
            request.prompt.tokens, request.max_tokens, self.stop_at[request], request.seed
        )
        if request in self.aborted:
            expected = expected[: len(request.output)]
        assert request.output == expected, request.id
