"""Ends reasoning at a budget of tokens. Imports no jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.sampling.bits import WORD

MAX_START = 64  # tokens at the beginning of an output that may be the marker of reasoning


class ThinkingLimit:
    """A `Constraint`: after `budget` tokens of reasoning only the first of `ends` may come.

    Markers are found in the text, since a model may write them in any tokens. What the model has
    written of the end marker when the budget is used up stays; the whole marker follows.

    Args:
        begun: whether the prompt has begun the reasoning.
        starts: the markers that begin it.
        ends: the markers that end it.
        end_ids: tokens of the first of these.
        decode: text of tokens, special tokens included.
    """

    def __init__(
        self,
        budget: int,
        begun: bool,
        starts: tuple[str, ...],
        ends: tuple[str, ...],
        end_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
    ):
        self._left = budget
        self._thinking = begun
        self._over = False
        self._starts = starts
        self._ends = ends
        self._end_ids = end_ids
        self._decode = decode
        self._forced = 0  # tokens of the end marker
        longest = max(len(end.encode()) for end in ends)
        self._tail: deque[int] = deque(maxlen=max(MAX_START, longest + 1))

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        for token in token_ids:
            if not self._over:
                self._accept(token)

    def apply_mask(self, allowed_W: np.ndarray) -> None:
        """See `Constraint`."""
        if self._over or not self._thinking or self._left > 0:
            return
        token = self._end_ids[self._forced]
        word = allowed_W[token // WORD] & np.uint32(1 << token % WORD)
        allowed_W[:] = 0
        allowed_W[token // WORD] = word

    def _accept(self, token: int) -> None:
        self._tail.append(token)
        text = self._decode(list(self._tail))
        if not self._thinking:
            self._thinking = any(start in text for start in self._starts)
            may_begin = any(start.startswith(text.strip()) for start in self._starts)
            self._over = not self._thinking and (not may_begin or len(self._tail) == MAX_START)
            if self._thinking:
                self._tail.clear()
        elif self._left > 0:
            self._left -= 1
            self._over = any(end in text for end in self._ends)
        else:
            self._forced += 1
            self._over = self._forced == len(self._end_ids)
