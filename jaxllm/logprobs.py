"""Packed log-probabilities on the host (`sampling.logprobs` packs them on the device). Imports no
jax.

They stay packed until somebody reads them, since objects for each of them would cost more than a
step: a row of bytes per token, as long as the request asked for. How many of the most likely tokens
a row holds is seen by its length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

import numpy as np

from jaxllm.messages import PromptLogprobs, TokenLogprobs

SMALL = 20  # the field's default of --max-logprobs; asking for few costs little


def widths(most: int) -> tuple[int, ...]:
    """How many of the most likely tokens programs give, one variant each."""
    return (min(SMALL, most),) if most <= SMALL else (SMALL, most)


def trimmed(packed: np.ndarray, count: int) -> np.ndarray:
    """Packed rows with the first `count` of the most likely tokens alone."""
    width = (packed.shape[1] - 2) // 2
    return np.concatenate(
        [packed[:, : 2 + count], packed[:, 2 + width : 2 + width + count]], axis=1
    )


class StepLogprobs:
    """The packed rows of one step, int32 `[rows, 2 + 2·width]`."""

    def __init__(self, packed: np.ndarray):
        self._packed = packed
        self._trimmed: dict[int, list[bytes]] = {}  # by how many of the most likely tokens

    def row(self, row: int, count: int) -> bytes:
        """One row with the first `count` of the most likely tokens."""
        rows = self._trimmed.get(count)
        if rows is None:
            packed, size = trimmed(self._packed, count).tobytes(), 8 + 8 * count
            rows = self._trimmed[count] = [
                packed[at : at + size] for at in range(0, len(packed), size)
            ]
        return rows[row]

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """The first `count` of the most likely tokens of one row, each with its log-probability."""
        return unpacked(self.row(row, count), (0,))[0].top


def unpacked(packed: bytes | bytearray | memoryview, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """The entries of these tokens, one packed row each."""
    return list(each(packed, tokens))


def each(packed: bytes | bytearray | memoryview, tokens: Sequence[int]) -> Iterator[TokenLogprobs]:
    """The same one after another, for who wants them once."""
    form, count = _row(len(packed) // max(1, len(tokens)))
    for token, (logprob, rank, *top) in zip(tokens, form.iter_unpack(packed), strict=True):
        yield TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=list(zip(top[:count], top[count:], strict=True)),
        )


def packed_from(entries: Iterable[TokenLogprobs], count: int) -> bytes:
    """What `unpacked` reads, with the first `count` of the most likely tokens of each entry, which
    has so many."""
    form, _ = _row(8 + 8 * count)
    return b"".join(
        form.pack(
            entry.logprob,
            entry.rank,
            *(id for id, _ in entry.top[:count]),
            *(value for _, value in entry.top[:count]),
        )
        for entry in entries
    )


def total(packed: bytes | bytearray, tokens: int) -> float:
    """The sum of the log-probabilities of so many chosen tokens."""
    return (
        math.fsum(np.frombuffer(packed, np.float32).reshape(tokens, -1)[:, 0].tolist())
        if tokens
        else 0.0
    )


def of_prompt(found: PromptLogprobs, prompt: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Of every token of the prompt but the first."""
    return each(found.packed, prompt[1:])


@functools.cache
def _row(size: int) -> tuple[Struct, int]:
    """How a row of so many bytes is read, and how many of the most likely tokens it holds."""
    count = max(0, size - 8) // 8
    return Struct(f"=fi{count}i{count}f"), count
