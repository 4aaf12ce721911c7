"""Divides a step's tokens among prompts. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.kv_manager import KVCacheManager
from jaxllm.engine.scheduling.plan import Chunk, Limits
from jaxllm.engine.scheduling.policy import RequestQueue
from jaxllm.engine.scheduling.prefill_budget import PrefillBudget
from jaxllm.engine.scheduling.request import Request


class ChunkPlanner:
    """Plans the chunks of a scheduler's steps; `queues` are those of its waiting requests.

    Attributes:
        budget: Bounds the chunk tokens of steps that also decode; None bounds nothing.
    """

    def __init__(
        self,
        limits: Limits,
        buckets: Buckets,
        kv_manager: KVCacheManager,
        queues: Sequence[RequestQueue],
    ):
        self._limits, self._buckets, self._kv_manager = limits, buckets, kv_manager
        self._queues = queues
        self.budget: PrefillBudget | None = None

    def plan(
        self,
        prefilling: list[Request],
        num_decodes: int,
        admissions: Callable[[list[Chunk]], Iterator[Request]] | None,
    ) -> tuple[Chunk, ...]:
        """Chunks beside `num_decodes` decodes: of requests in mid-prefill, then of those that
        `admissions` admits when it is given the chunks so far."""
        waiting = sum(map(len, self._queues))
        if not prefilling and not (admissions is not None and waiting):
            return ()
        limit = min(self._limits.max_num_batched_tokens - num_decodes, self._buckets.max_tokens)
        if num_decodes and self.budget is not None:
            tokens = self._prompt_tokens(prefilling, 4 * self.budget.max_tokens)
            several = len(prefilling) + waiting > 1
            limit = min(limit, self.budget.tokens(tokens, several, num_decodes))
        if limit < 1:
            return ()
        chunks: list[Chunk] = []
        total = 0
        for request in chain(prefilling, admissions(chunks) if admissions is not None else ()):
            if chunks:
                self._advance(chunks[-1])
            start = request.computed
            end = min(request.prefill_end, request.capacity, start + limit - total)
            chunks.append(Chunk(request, start, end - start, end == request.prefill_end))
            total += end - start
            if total == limit or len(chunks) == self._buckets.max_chunks:
                break
        if chunks:
            chunks[-1] = self._trimmed(chunks, total, num_decodes)
            self._advance(chunks[-1])
        return tuple(chunks)

    def _prompt_tokens(self, prefilling: list[Request], enough: int) -> int:
        """Prompt tokens yet to be computed, counted up to `enough`."""
        total = sum(request.prefill_end - request.computed for request in prefilling)
        for request in chain.from_iterable(self._queues):
            if total >= enough:
                break
            total += request.num_tokens
        return total

    def _trimmed(self, chunks: list[Chunk], total: int, num_decodes: int) -> Chunk:
        """The last chunk, shortened where a smaller shape is worth it. It keeps at least a token,
        and comes first next time."""
        last = chunks[-1]
        length = last.length - (total - self._buckets.trim(total, len(chunks), num_decodes))
        return Chunk(last.request, last.start, length, False) if 0 < length < last.length else last

    def _advance(self, chunk: Chunk) -> None:
        """Count the chunk as computed and index the pages it fills."""
        end = chunk.start + chunk.length
        chunk.request.computed = end
        if chunk.final:
            chunk.request.num_scheduled_outputs += 1
        self._kv_manager.register(chunk.request, chunk.start, end)
