"""The finite lattice of shapes that are compiled: every step is padded up to one of them. Imports no jax.

`decode` programs run n rows of one token. `extend` programs run T chunk tokens of at most R prompts plus a region of B
decode rows. On an accelerator a few rows more cost little below ~256 rows and proportionally above, so the token ladder is about
factor two, and the scheduler cuts a chunk (`trim`) where padding would cost more than another step. A wider decode region replaces
a narrower one as soon as it adds less than an eighth, which keeps the lattice near thirty programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DECODE_GPU = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_TOKENS_GPU = (16, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768)
_REGIONS_GPU = (64, 256)
_TOKENS_CPU = (16, 32, 64, 256, 1024, 4096, 16384)
_MAX_CHUNKS = 64
_ALIGN = 16  # tokens; the largest bucket is rounded up to whole matmul tiles


class BucketError(ValueError):
    """No compiled shape is large enough."""


@dataclass(frozen=True, slots=True, order=True)
class ExtendShape:
    """`tokens` chunk tokens (T) of at most `chunks` prompts (R), and `decodes` decode rows (B)."""

    tokens: int
    chunks: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Compiled shapes, ascending. `step_cost` is what one more step costs, in chunk tokens."""

    decode: tuple[int, ...]
    extend: tuple[ExtendShape, ...]
    step_cost: int

    @classmethod
    def build(cls, max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> Buckets:
        """The lattice for a device kind ("cpu", "gpu", "tpu"): any step within both limits fits."""
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise BucketError(f"max_num_seqs ({max_num_seqs}) and max_num_batched_tokens ({max_num_batched_tokens}) must be at least 1")
        cpu = platform == "cpu"
        top = -(-max_num_batched_tokens // _ALIGN) * _ALIGN
        ladder = [t for t in (_TOKENS_CPU if cpu else _TOKENS_GPU) if t < top] + [top]
        between = [] if cpu else [b for b in _REGIONS_GPU if 2 * b <= max_num_seqs]
        regions = [0, *between, max_num_seqs]
        shapes = []
        for region, wider in zip(regions, [*regions[1:], None], strict=True):
            for tokens in ladder:
                narrow = tokens < region // 2 and tokens < top  # too few tokens for so wide a region: rounded up instead
                wide = wider is not None and tokens > 8 * (wider - region)  # the wider region adds less than an eighth
                if not narrow and not wide:
                    shapes.append(ExtendShape(tokens, _chunk_rows(tokens, max_num_seqs, cpu), region))
        return cls(_decode_rows(max_num_seqs, cpu), tuple(sorted(shapes)), 32 if cpu else 128)

    @property
    def programs(self) -> int:
        """How many programs the lattice compiles, samplers apart."""
        return len(self.decode) + len(self.extend)

    @property
    def max_tokens(self) -> int:
        """Chunk tokens of the largest shape."""
        return self.extend[-1].tokens

    @property
    def max_chunks(self) -> int:
        """Prompts of the largest shape."""
        return self.extend[-1].chunks

    def fit_decode(self, n: int) -> int:
        """The smallest row count that holds `n` decodes."""
        for rows in self.decode:
            if rows >= n:
                return rows
        raise BucketError(f"{n} decode rows do not fit: the largest compiled shape has {self.decode[-1]}; raise max_num_seqs")

    def fit_extend(self, tokens: int, chunks: int, decodes: int) -> ExtendShape:
        """The shape with the fewest rows in all that holds so many chunk tokens, prompts and decode rows."""
        fitting = [s for s in self.extend if s.tokens >= tokens and s.chunks >= chunks and s.decodes >= decodes]
        if not fitting:
            big = self.extend[-1]
            raise BucketError(
                f"{tokens} tokens of {chunks} prompts with {decodes} decodes do not fit: the largest compiled shape has {big.tokens}, "
                f"{big.chunks} and {big.decodes}; raise max_num_batched_tokens or max_num_seqs"
            )
        return min(fitting, key=lambda s: (s.tokens + s.decodes, s))

    def trim(self, tokens: int, chunks: int, decodes: int) -> int:
        """How many of `tokens` to run now: all, or the full shape below when that and a step for the rest cost less.

        Example (accelerator, no decodes): 530 tokens would pad to 768; 512 now, 18 (padded to 64) in the next step and 128 for
        that step come to 704, so the answer is 512. For 700 tokens, 512 + 256 + 128 is more than 768: all of them run now.
        """
        whole = self.fit_extend(tokens, chunks, decodes)
        below = [s.tokens for s in self.extend if s.tokens < tokens and s.chunks >= chunks and s.decodes >= decodes]
        if not below or whole.tokens == tokens:
            return tokens
        now = max(below)
        rest = self.fit_extend(tokens - now, 1, decodes).tokens
        cost = self.step_cost // 2 if decodes else self.step_cost  # decodes make the next step run anyway
        return now if now + rest + cost < whole.tokens else tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        extend = [[s.tokens, s.chunks, s.decodes] for s in self.extend]
        return {"decode": list(self.decode), "extend": extend, "step_cost": self.step_cost}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Buckets:
        """The lattice that `to_dict` wrote."""
        return cls(tuple(data["decode"]), tuple(ExtendShape(*s) for s in data["extend"]), data["step_cost"])


def _decode_rows(max_num_seqs: int, cpu: bool) -> tuple[int, ...]:
    """Row counts up to `max_num_seqs`: factors of four on CPU, finer and then steps of an eighth elsewhere."""
    rows = [4**i for i in range(16)] if cpu else list(_DECODE_GPU)
    while rows[-1] < max_num_seqs:
        rows.append(rows[-1] + max(32, 2 ** (rows[-1].bit_length() - 1) // 4))
    return (*(r for r in rows if r < max_num_seqs), max_num_seqs)


def _chunk_rows(tokens: int, max_num_seqs: int, cpu: bool) -> int:
    """R for T: prompts of 16 tokens on average, and never more rows than tokens or slots.

    Spare chunk rows cost time on CPU, where attention walks every row, and almost none on an accelerator.
    """
    return min(max_num_seqs, _MAX_CHUNKS, tokens, max(1 if cpu else 4, tokens // 16))
