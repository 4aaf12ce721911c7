"""The compiled shapes: every step is padded up to one. Imports no jax.

`decode` programs run n rows of one token. `extend` programs run T chunk tokens of at most R prompts
plus a region of B decode rows. On an accelerator a few more rows cost little below ~256 rows and
proportionally above. So token counts grow by about factor two, and the scheduler shortens a chunk
(`trim`) where padding would cost more than another step. Prompts alone run in shapes without decode
rows. Beside decodes token counts grow faster, and narrow regions have few tokens only,
because elsewhere a wider region adds little. That keeps the lattice at thirty programs. Tokens
and decode rows together fill whole tiles of matrix products, and the largest steps have no more
rows beside decodes than without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_DECODE_GPU = (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # 2 to 8 rows cost the same
_ALONE_GPU = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens of prompts alone
# Tokens beside decode rows, before the rest of the last tile is added
_BESIDE_GPU = (64, 256, 512, 1536, 3840, 8192)
_TWO_GPU = (1024, 64)  # and two prompts of 512 beside few streams, for when several wait
_TILE_GPU = 128  # rows of a matrix product's tile
_FITTED_GPU = range(513, 577)  # rows for which tiles are made that fit (`pallas_kernels.matmul`)
_REGIONS_GPU = (32, 64, 256)
_SHORT_GPU = 512  # tokens of a prompt
_MOST_TOKENS_REGION_GPU = 512  # one more for the largest steps of many slots
# Tokens of a region, as multiples of its rows; the widest region also has more
_REGION_SPAN = (2, 32)
_LOGITS_GPU = (16, 64, 128, 256)  # rows of logits: fewer cost the same on the way to a token
_COPIES = (16, 64)  # pages copied at once
_SCORE_GPU = 256
_SCORE_CPU = 32
_TOKENS_CPU = (16, 32, 64, 256, 1024, 4096, 16384)
_MAX_CHUNKS = 64
# Rows, to which the largest shapes are rounded up: cuBLASLt's products of 8 bits take no other
# numbers of rows, and XLA copies their inputs to larger arrays
_ALIGN = 16
_UNALIGNED_GPU = 64  # requests up to which kernels of our own multiply


class BucketError(ValueError):
    """No compiled shape is large enough."""


@dataclass(frozen=True, slots=True, order=True)
class ExtendShape:
    """`tokens` chunk tokens (T) of at most `chunks` prompts (R), and `decodes` decode rows (B)."""

    tokens: int
    chunks: int
    decodes: int

    def fits_in(self, other: ExtendShape) -> bool:
        """Whether another shape holds every step that this one holds."""
        return (
            self != other
            and self.tokens <= other.tokens
            and self.chunks <= other.chunks
            and self.decodes <= other.decodes
        )


@dataclass(frozen=True, slots=True)
class Buckets:
    """Compiled shapes, ascending.

    Attributes:
        decode: Rows of the decode programs.
        extend: Shapes of the extend programs.
        logits: Row counts that logits are padded to, each with sampling programs of its own. A step
            has no more requests than slots, so the last may be less than a shape's rows.
        step_cost: Cost of one more step, in chunk tokens.
        score: Hidden states that become prompt log-probabilities at once.
    """

    decode: tuple[int, ...]
    extend: tuple[ExtendShape, ...]
    logits: tuple[int, ...]
    step_cost: int
    score: int = 32
    # The extend shapes in the order in which `fit_extend` takes them
    _by_rows: tuple[ExtendShape, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = sorted(self.extend, key=lambda s: (s.tokens + s.decodes, s.decodes))
        object.__setattr__(self, "_by_rows", tuple(ordered))

    @classmethod
    def build(cls, max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
        """The lattice for a device kind ("cpu", "gpu", "tpu"): any step within both limits fits
        that has no more chunk tokens than `most_tokens`."""
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise BucketError(
                f"max_num_seqs ({max_num_seqs}) and max_num_batched_tokens"
                f" ({max_num_batched_tokens}) must be at least 1"
            )
        cpu = platform == "cpu"
        top = _aligned(max_num_batched_tokens)
        if cpu or max_num_seqs <= _UNALIGNED_GPU:
            slots = max_num_seqs
        else:
            slots = _aligned(max_num_seqs)
        if cpu:
            pairs = _pairs_cpu(top, slots)
        else:
            pairs = _pairs(top, slots)
        # From the largest beside the widest region on, all hold as many prompts: a step with more
        # tokens beside fewer decodes may have any of them
        largest = max(tokens for tokens, region in pairs if region == slots)
        shapes = {
            ExtendShape(
                tokens,
                min(tokens, _chunk_rows(top if tokens >= largest else tokens, slots, cpu)),
                region,
            )
            for tokens, region in pairs
        }
        decode = _decode_rows(slots, cpu)
        most = max(s.decodes + s.chunks for s in shapes)
        return cls(
            decode,
            tuple(sorted(shapes)),
            decode if cpu else _logit_rows(slots, most),
            32 if cpu else 128,
            min(top, _SCORE_CPU if cpu else _SCORE_GPU),
        )

    @classmethod
    def batch_invariant(
        cls, max_num_seqs: int, max_num_batched_tokens: int, platform: str
    ) -> Buckets:
        """One shape for decodes and one for prompts, which run apart, so that the program of a
        token does not depend on other requests."""
        usual = cls.build(max_num_seqs, max_num_batched_tokens, platform)
        prompts = ExtendShape(
            usual.max_tokens, _chunk_rows(usual.max_tokens, max_num_seqs, platform == "cpu"), 0
        )
        decode = usual.decode[-1]
        return cls(
            (decode,),
            (prompts,),
            tuple(sorted({decode, prompts.chunks})),
            usual.step_cost,
            usual.score,
        )

    @classmethod
    def pooling(cls, max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
        """Shapes for prompts alone: nothing decodes."""
        usual = cls.build(max_num_seqs, max_num_batched_tokens, platform)
        cpu = platform == "cpu"
        tokens = {shape.tokens for shape in usual.extend if cpu or not shape.decodes}
        prompts = tuple(
            ExtendShape(count, _chunk_rows(count, max_num_seqs, cpu), 0) for count in sorted(tokens)
        )
        rows = tuple(sorted({shape.chunks for shape in prompts}))
        return cls((max_num_seqs,), prompts, rows, usual.step_cost, usual.score)

    @property
    def first(self) -> Buckets:
        """The fewest of these shapes that hold any step, and a small one of each kind, so that a
        short step does not take as long as the largest. `logits` are their row counts."""
        most = max(shape.decodes for shape in self.extend)
        small = next(shape for shape in self.extend if shape.decodes == most)
        largest = {shape for shape in self.extend if not any(map(shape.fits_in, self.extend))}
        return self.restricted({self.decode[0], self.decode[-1], small, *largest}.__contains__)

    def restricted(self, is_there: Callable[[int | ExtendShape], bool]) -> Buckets:
        """The forwards that are there, and their counts of rows of logits."""
        decode = tuple(filter(is_there, self.decode))
        extend = tuple(filter(is_there, self.extend))
        shapes: list[int | ExtendShape] = [*decode, *extend]
        logits = tuple(sorted({self.logit_rows(shape) for shape in shapes}))
        return replace(self, decode=decode, extend=extend, logits=logits)

    @property
    def copies(self) -> tuple[int, ...]:
        """Pages that the copy programs take at once; a step copies at most one per row."""
        return tuple(sorted({min(pairs, self.decode[-1]) for pairs in _COPIES}))

    @property
    def max_tokens(self) -> int:
        """Chunk tokens of the largest shape."""
        return self.extend[-1].tokens

    @property
    def max_rows(self) -> int:
        """Chunk tokens and decode rows of the largest step."""
        return max([*self.decode, *(s.tokens + s.decodes for s in self.extend)])

    def most_tokens(self, decodes: int) -> int:
        """Chunk tokens of the largest shape for so many decodes."""
        return max(s.tokens for s in self.extend if s.decodes >= decodes)

    @property
    def max_chunks(self) -> int:
        """Prompts of the largest shape."""
        return self.extend[-1].chunks

    def fit_decode(self, n: int) -> int:
        """The smallest row count that holds `n` decodes."""
        for rows in self.decode:
            if rows >= n:
                return rows
        raise BucketError(
            f"{n} decode rows do not fit: the largest compiled shape has {self.decode[-1]};"
            " raise max_num_seqs"
        )

    def fit_extend(self, tokens: int, chunks: int, decodes: int) -> ExtendShape:
        """The smallest shape that holds these chunk tokens, prompts and decode rows: with the
        fewest rows in all, and of these the fewest decode rows."""
        for s in self._by_rows:
            if s.tokens >= tokens and s.chunks >= chunks and s.decodes >= decodes:
                return s
        big = self.extend[-1]
        raise BucketError(
            f"{tokens} tokens of {chunks} prompts with {decodes} decodes do not fit: the"
            f" largest compiled shape has {big.tokens}, {big.chunks} and {big.decodes};"
            " raise max_num_batched_tokens or max_num_seqs"
        )

    def logit_rows(self, shape: int | ExtendShape) -> int:
        """Rows of logits of a decode bucket or an extend shape: one per decode row and chunk,
        padded."""
        if isinstance(shape, ExtendShape):
            needed = shape.decodes + shape.chunks
        else:
            needed = shape
        return next(rows for rows in self.logits if rows >= min(needed, self.logits[-1]))

    def closes_gaps(self, shape: ExtendShape) -> bool:
        """Whether the rows of logits that a step uses move together: the chunks' stand behind those
        of its decodes, not behind those of the shape."""
        return shape.decodes + shape.chunks > self.logits[-1]

    def trim(self, tokens: int, chunks: int, decodes: int) -> int:
        """Tokens of these to run now: all, or those of the next smaller shape when that and steps
        for the rest cost less.

        Example (accelerator, no decodes): 700 tokens would pad to 1024; 512 now, 188 (padded to
        256) in the next step and 128 for that step come to 896, so the answer is 512. For 900
        tokens, 512 + 512 + 128 is more than 1024: all of them run now.
        """
        return self._cheapest(tokens, chunks, decodes)[1]

    def _cheapest(self, tokens: int, chunks: int, decodes: int) -> tuple[int, int]:
        """What these tokens cost, in tokens, and how many of them then run now."""
        whole = self.fit_extend(tokens, chunks, decodes).tokens
        if whole == tokens:
            return whole, tokens
        below = [
            s.tokens
            for s in self.extend
            if s.tokens < tokens and s.chunks >= chunks and s.decodes >= decodes
        ]
        if not below:
            return whole, tokens
        now = max(below)
        # Decodes make the next step run anyway
        if decodes:
            step = self.step_cost // 2
        else:
            step = self.step_cost
        cost = now + step + self._cheapest(tokens - now, 1, decodes)[0]
        if cost < whole:
            return (cost, now)
        return (whole, tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "decode": list(self.decode),
            "extend": [[s.tokens, s.chunks, s.decodes] for s in self.extend],
            "logits": list(self.logits),
            "step_cost": self.step_cost,
            "score": self.score,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Buckets:
        """The lattice that `to_dict` wrote."""
        return cls(
            tuple(data["decode"]),
            tuple(ExtendShape(*s) for s in data["extend"]),
            tuple(data["logits"]),
            data["step_cost"],
            data["score"],
        )


def _pairs_cpu(top: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """(tokens, decode rows) on CPU: few, since each takes seconds to compile. Token counts alone
    where all decode rows would add more than an eighth, and beside all of them from four times as
    many tokens on."""
    ladder = [t for t in _TOKENS_CPU if t < top] + [top]
    alone = [t for t in ladder if t <= 8 * max_num_seqs]
    return [(t, 0) for t in alone] + [
        (t, max_num_seqs) for t in ladder if t >= 4 * max_num_seqs or t == top
    ]


def _pairs(top: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """(tokens, decode rows) on accelerators."""
    pairs = [(t, 0) for t in (*(t for t in _ALONE_GPU if t < top), top)]
    low, high = _REGION_SPAN
    for region in (r for r in _REGIONS_GPU if 2 * r <= max_num_seqs):
        pairs += [
            (_fill(t, region, top), region)
            for t in _BESIDE_GPU
            if t <= top and low * region <= t <= high * region
        ]
    if _TWO_GPU[0] < top and _TWO_GPU[1] <= max_num_seqs:
        pairs.append((_fill(*_TWO_GPU, top), _TWO_GPU[1]))
    least = low * max_num_seqs
    if max_num_seqs > _REGIONS_GPU[-1]:  # a short prompt beside many decodes is no rare step
        least = min(least, _SHORT_GPU)
    wide = [_fill(t, max_num_seqs, top) for t in _BESIDE_GPU if least <= t < top]
    widest = [max_num_seqs]
    if _MOST_TOKENS_REGION_GPU * 3 <= max_num_seqs * 2:
        widest.append(_MOST_TOKENS_REGION_GPU)
    return [
        *pairs,
        *((t, max_num_seqs) for t in wide),
        *((_beside(region, top), region) for region in widest),
    ]


def _beside(region: int, top: int) -> int:
    """Chunk tokens of the largest step beside `region` decode rows. A step has `top` tokens in all,
    and rows that no token can fill take as long as others; small steps keep theirs, so that decodes
    leave room for prompts."""
    if top >= 4 * region:
        return top - region
    return top


def _aligned(rows: int, to: int = _ALIGN) -> int:
    return -(-rows // to) * to


def _fill(tokens: int, region: int, top: int) -> int:
    """`tokens`, and those that fill the last tile beside `region` decode rows."""
    if tokens + region in _FITTED_GPU:
        return min(_beside(region, top), tokens)
    return min(_beside(region, top), _aligned(tokens + region, _TILE_GPU) - region)


def _decode_rows(max_num_seqs: int, cpu: bool) -> tuple[int, ...]:
    """Row counts up to `max_num_seqs`: factors of four on CPU, finer elsewhere."""
    if cpu:
        rows = [4**i for i in range(16)]
    else:
        rows = list(_DECODE_GPU)
    while rows[-1] < max_num_seqs:
        rows.append(rows[-1] + max(32, 2 ** (rows[-1].bit_length() - 1) // 2))
    return (*(r for r in rows if r < max_num_seqs), max_num_seqs)


def _logit_rows(slots: int, most: int) -> tuple[int, ...]:
    """Row counts of logits on accelerators for so many decodes, and for `most` with the prompts
    beside them. With many slots these are no more by much, and each count has buffers of its own
    and programs to compile."""
    rows = {*(n for n in _LOGITS_GPU if n < most), most}
    return tuple(sorted(rows | ({slots} if most > slots + slots // 8 else set())))


def _chunk_rows(tokens: int, max_num_seqs: int, cpu: bool) -> int:
    """Chunk rows for `tokens`: prompts of 16 tokens on average, and never more rows than tokens or
    slots.

    Unused chunk rows cost time on CPU, where attention visits every row, and almost none on an
    accelerator.
    """
    return min(max_num_seqs, _MAX_CHUNKS, tokens, max(1 if cpu else 4, tokens // 16))
