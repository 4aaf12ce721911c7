"""What a step may hold. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step and one request may hold: slots, tokens of a step (decodes included), tokens of
    a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Chunk tokens of a step that also decodes, so that a long prompt does not stall running
    streams. `bounds` has, for steps of up to so many decode rows, ascending: the rows, the tokens
    while one prompt waits, those while several do, and the most."""

    bounds: tuple[tuple[int, int, int, int], ...]

    @property
    def most(self) -> int:
        """Chunk tokens that no step goes beyond."""
        return max(high for *_, high in self.bounds)

    def tokens(self, waiting: int, several: bool, decodes: int) -> int:
        """The bound for a step of `decodes` rows when so many tokens of one or `several` prompts
        wait: a quarter of them, within the limits."""
        _, one, some, high = next((b for b in self.bounds if b[0] >= decodes), self.bounds[-1])
        return min(max(waiting // 4, some if several else one), high)
