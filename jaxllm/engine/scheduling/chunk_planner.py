"""Divides a step's tokens among prompts, within the budget of steps that also decode. Imports no
jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape
from jaxllm.engine.scheduling.kv_manager import KVCacheManager
from jaxllm.engine.scheduling.plan import Chunk, Limits, Plan
from jaxllm.engine.scheduling.policy import RequestQueue
from jaxllm.engine.scheduling.request import Request

# Of the longest stall wanted: what warm-up timed of a shape leaves out attention to context
STALL_SHARE = 0.85
FEW_TOKENS_STALL = 0.1  # seconds; little is gained by a longer one while few tokens wait
ONE_PROMPT_SHARE = 0.14
# When several prompts wait: one step for two takes less than two steps, and the last prompt waits
# least
SEVERAL_PROMPTS_SHARE = 0.25
CERTAIN_SHARE = 0.9  # of the seconds that chunks add to a step by warm-up


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Chunk tokens of a step that also decodes, so that a long prompt does not stall running
    streams.

    Attributes:
        bounds: A row per decode region, ascending: its most decode rows, the tokens while one
            prompt waits, the tokens while several do, and the largest number of tokens.
    """

    bounds: tuple[tuple[int, int, int, int], ...]

    @property
    def max_tokens(self) -> int:
        """Chunk tokens that no step exceeds."""
        return max(high for *_, high in self.bounds)

    def tokens(self, waiting: int, several: bool, decodes: int) -> int:
        """The budget of a step of `decodes` rows while `waiting` tokens of one or `several`
        prompts wait: a quarter of these, within the bounds."""
        _, one, some, high = next((b for b in self.bounds if b[0] >= decodes), self.bounds[-1])
        return min(max(waiting // 4, some if several else one), high)


@dataclass(frozen=True, slots=True)
class Taper:
    """Ever shorter steps towards the end of what waits, for an engine whose pages are sent on:
    those of a step leave while the next one runs, and those of the last step leave behind it.

    Attributes:
        least: Tokens of the shortest steps, which must still fill the device.
    """

    least: int

    def tokens(self, waiting: int) -> int:
        """Chunk tokens of a step while `waiting` tokens wait, its own included: half of them."""
        return max(self.least, waiting // 2)


def prefill_budget(seconds: Mapping[object, float], stall: float) -> PrefillBudget | None:
    """The budget that keeps a step below `stall` seconds when many tokens wait.

    When few tokens wait, a step stays near a seventh of that, and of `FEW_TOKENS_STALL`, and below
    a quarter when they are of several prompts. Computed from the `seconds` that the extend shapes
    with decode rows took in warm-up; None when nothing was measured.
    """
    taken = {
        shape: took
        for shape, took in seconds.items()
        if isinstance(shape, ExtendShape) and shape.decodes
    }

    def largest(rows: int, bound: float) -> int:
        wide = {shape: took for shape, took in taken.items() if shape.decodes >= rows}
        return max(
            (s.tokens for s, took in wide.items() if took <= bound),
            default=min(s.tokens for s in wide),
        )

    regions = sorted({shape.decodes for shape in taken})
    few = min(stall, FEW_TOKENS_STALL)
    one = ONE_PROMPT_SHARE * few
    several = SEVERAL_PROMPTS_SHARE * few
    most = STALL_SHARE * stall
    bounds = tuple(
        (rows, largest(rows, one), largest(rows, several), largest(rows, most)) for rows in regions
    )
    if bounds:
        return PrefillBudget(bounds)
    return None


def seconds_per_token(seconds: Mapping[object, float]) -> float:
    """Seconds that a prompt token takes at best, from what warm-up measured; infinite when it
    measured nothing."""
    return min(
        (took / shape.tokens for shape, took in seconds.items() if isinstance(shape, ExtendShape)),
        default=float("inf"),
    )


def added_by_chunks(seconds: Mapping[object, float], buckets: Buckets, plan: Plan) -> float | None:
    """Seconds that a step certainly takes longer because of its chunks, from what warm-up
    measured. 0 when it measured nothing, None for a step without chunks."""
    if not plan.chunks:
        return None
    tokens = sum(chunk.length for chunk in plan.chunks)
    rows = len(plan.decodes)
    whole = seconds.get(buckets.fit_extend(tokens, len(plan.chunks), rows), 0.0)
    return max(0.0, CERTAIN_SHARE * (whole - seconds.get(buckets.fit_decode(max(1, rows)), 0.0)))


class ChunkPlanner:
    """Plans the chunks of a scheduler's steps; `queues` are those of its waiting requests.

    Attributes:
        budget: Bounds the chunk tokens of steps that also decode; None bounds nothing.
        taper: Shortens the last steps of what waits; None shortens none.
        whole_prompts: A prompt is one chunk, which every step's limit must hold.
    """

    def __init__(
        self,
        limits: Limits,
        buckets: Buckets,
        kv_manager: KVCacheManager,
        queues: Sequence[RequestQueue],
    ):
        self._limits = limits
        self._buckets = buckets
        self._kv_manager = kv_manager
        self._queues = queues
        self.budget: PrefillBudget | None = None
        self.taper: Taper | None = None
        self.whole_prompts = False

    def plan(
        self,
        prefilling: list[Request],
        num_decodes: int,
        admissions: Callable[[list[Chunk]], Iterator[Request]] | None,
        drafts: int = 0,
    ) -> tuple[Chunk, ...]:
        """Chunks beside `num_decodes` decodes, which have `drafts` in all: of requests in
        mid-prefill, then of requests that `admissions` admits, given the chunks so far."""
        waiting = sum(map(len, self._queues))
        if not prefilling and not (admissions is not None and waiting):
            return ()
        limit = self._limit(prefilling, waiting, num_decodes, drafts)
        if limit < 1:
            return ()
        chunks: list[Chunk] = []
        total = 0
        for request in chain(prefilling, admissions(chunks) if admissions is not None else ()):
            if chunks:
                self._advance(chunks[-1])
            start = request.computed
            end = min(request.prefill_end, request.capacity, start + limit - total)
            if self.whole_prompts and end < request.prefill_end:
                break  # it comes first in the next step
            chunks.append(Chunk(request, start, end - start, end == request.prefill_end))
            total += end - start
            if total == limit or len(chunks) == self._buckets.max_chunks:
                break
        if chunks:
            chunks[-1] = self._trimmed(chunks, total, num_decodes)
            self._advance(chunks[-1])
        return tuple(chunks)

    def _limit(self, prefilling: list[Request], waiting: int, num_decodes: int, drafts: int) -> int:
        """Chunk tokens of a step, below 1 for none: what its limits, the budget and the taper
        leave, less what would pad it to a shape whose time is better spent on two smaller ones."""
        room = self._limits.max_num_batched_tokens - num_decodes - drafts
        most = min(room, self._buckets.most_tokens(num_decodes))
        if most < 1 or self.whole_prompts:
            return most
        budget = self.budget if num_decodes else None
        if budget is None:
            enough = 2 * most
        else:
            enough = 4 * budget.max_tokens
        tokens = self._prompt_tokens(prefilling, enough)
        if self.taper is not None:
            most = min(most, self.taper.tokens(tokens))
        if budget is not None:
            several = len(prefilling) + waiting > 1
            most = min(most, budget.tokens(tokens, several, num_decodes))
        return self._buckets.trim(min(tokens, most), 1, num_decodes)

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
        if self.whole_prompts:
            return last
        length = last.length - (total - self._buckets.trim(total, len(chunks), num_decodes))
        if 0 < length < last.length:
            return Chunk(last.request, last.start, length, False)
        return last

    def _advance(self, chunk: Chunk) -> None:
        """Count the chunk as computed and index the pages it fills."""
        request = chunk.request
        end = chunk.end
        if not request.has_run:
            self._kv_manager.counts.note_first_run(request)
        request.computed = end
        request.num_scheduled_outputs += chunk.final
        self._kv_manager.register(request, chunk.start, end)
