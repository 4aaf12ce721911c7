"""Packed log-probabilities on the host; `sampling.logprobs` packs them on the device. Imports no
jax.

Each token has a row of bytes: its log-probability, its rank, then ids and log-probabilities of the
most likely tokens. The row's length gives their number. Rows stay packed until they are read, since
objects for every token would cost more than a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

import numpy as np

from jaxllm.messages import PromptLogprobs, TokenLogprobs

SMALL = 20  # vLLM's default of --max-logprobs


def most_logprobs(wished: int, vocab_size: int) -> int:
    """Most log-probabilities of a token that a request may ask for; a wish of -1 sets no limit."""
    if wished < 0:
        return vocab_size
    return min(wished, vocab_size)


def widths(most: int) -> tuple[int, ...]:
    """How many of the most likely tokens a program's variants return."""
    if most <= SMALL:
        return (min(SMALL, most),)
    return (SMALL, most)


def trimmed(packed: np.ndarray, count: int) -> np.ndarray:
    """Packed int32 rows with only the first `count` of the most likely tokens."""
    width = (packed.shape[1] - 2) // 2
    return np.concatenate(
        [packed[:, : 2 + count], packed[:, 2 + width : 2 + width + count]], axis=1
    )


def first_rows(packed: bytes | None, count: int, tokens: int) -> bytes | None:
    """The first `count` of the packed rows of `tokens` tokens, if there are any."""
    return packed and packed[: len(packed) // tokens * count]


class StepLogprobs:
    """The packed rows of one step: int32 `[rows, 2 + 2·width]` where each row of the step gives a
    token, `[rows, n, 2 + 2·width]` where it gives up to n."""

    def __init__(self, packed: np.ndarray):
        self._places = packed.shape[1] if packed.ndim == 3 else 1
        self._packed = packed.reshape(-1, packed.shape[-1])
        self._trimmed: dict[int, bytes] = {}  # by `count`

    def row(self, row: int, count: int, tokens: int = 1) -> bytes:
        """The bytes of the first `tokens` tokens of one row, each with the first `count` of the
        most likely tokens."""
        packed = self._trimmed.get(count)
        if packed is None:
            packed = self._trimmed[count] = trimmed(self._packed, count).tobytes()
        size = 8 + 8 * count
        start = row * self._places * size
        return packed[start : start + tokens * size]

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """(id, log-probability) of the first `count` of the most likely tokens of one row."""
        return unpacked(self.row(row, count), (0,))[0].top


def unpacked(packed: bytes | bytearray | memoryview, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """The entries of tokens, one packed row each."""
    return list(entries_of(packed, tokens))


def entries_of(
    packed: bytes | bytearray | memoryview, tokens: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """The entries of `unpacked`, one after another."""
    form, count = _row(len(packed) // max(1, len(tokens)))
    for token, (logprob, rank, *top) in zip(tokens, form.iter_unpack(packed), strict=True):
        yield TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=list(zip(top[:count], top[count:], strict=True)),
        )


def packed_from(entries: Iterable[TokenLogprobs], count: int) -> bytes:
    """The inverse of `unpacked`, with the first `count` of each entry's most likely tokens."""
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
    """The sum of the log-probabilities of `tokens` chosen tokens."""
    if tokens:
        return math.fsum(np.frombuffer(packed, np.float32).reshape(tokens, -1)[:, 0].tolist())
    return 0.0


def prompt_entries(logprobs: PromptLogprobs, prompt: Sequence[int]) -> Iterator[TokenLogprobs]:
    """The entries of every token of the prompt but the first."""
    return entries_of(logprobs.packed, prompt[1:])


@functools.cache
def _row(size: int) -> tuple[Struct, int]:
    """The format of a row of `size` bytes, and how many of the most likely tokens it holds."""
    count = max(0, size - 8) // 8
    return Struct(f"=fi{count}i{count}f"), count
