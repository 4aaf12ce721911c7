"""Packed log-probabilities on the host (`sampling.logprobs` packs them). Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.engine.request import PromptLogprobs, TokenLogprobs

SMALL = 20  # the field's default of --max-logprobs; asking for few costs little


def widths(most: int) -> tuple[int, ...]:
    """How many of the most likely tokens programs give, one variant each."""
    return (min(SMALL, most),) if most <= SMALL else (SMALL, most)


def trimmed(packed: np.ndarray, count: int) -> np.ndarray:
    """Packed rows with the first `count` of the most likely tokens alone."""
    width = (packed.shape[1] - 2) // 2
    return np.concatenate([packed[:, : 2 + count], packed[:, 2 + width : 2 + width + count]], axis=1)


def unpacked(found: PromptLogprobs, prompt: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Of every token of the prompt but the first."""
    packed = np.frombuffer(found.packed, np.int32).reshape(-1, 2 + 2 * found.top)
    rows = Logprobs.unpack(packed, found.top)
    return (rows.at(row, token, found.top) for row, token in enumerate(prompt[1:]))


@dataclass(frozen=True)
class Logprobs:
    """One entry a row, as Python's own numbers: the arrays are turned into lists at once, which costs least."""

    logprobs: list[float]
    ranks: list[int]
    ids: list[list[int]]
    values: list[list[float]]

    @classmethod
    def unpack(cls, packed: np.ndarray, count: int) -> Logprobs:
        """From int32 `[rows, 2 + 2·width]`, with the first `count` of the most likely tokens."""
        width = (packed.shape[1] - 2) // 2
        bits = packed.view(np.float32)
        ids, values = packed[:, 2 : 2 + count], bits[:, 2 + width : 2 + width + count]
        return cls(bits[:, 0].tolist(), packed[:, 1].tolist(), ids.tolist(), values.tolist())

    def at(self, row: int, token: int, count: int) -> TokenLogprobs:
        """Of one row, whose token is `token`, with `count` of the most likely ones."""
        top = list(zip(self.ids[row], self.values[row], strict=True))
        if len(top) > count:
            del top[count:]
        return TokenLogprobs(token_id=token, logprob=self.logprobs[row], rank=self.ranks[row], top=top)
