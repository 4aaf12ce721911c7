"""Constraints decide on the host which tokens may follow those before. Imports no jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxllm.sampling.bits import remove


class ConstraintError(Exception):
    """A constraint cannot go on; the message is for the client. It ends its own request only."""


class Constraint(Protocol):
    """Follows the tokens of one choice and masks those that may not come next.

    The engine calls `accept_tokens` with each generated token, in order, and `apply_mask` once
    before each draw. Calls may come from different threads, but never at once. A constraint
    survives preemption. Whatever it raises ends the choice with an error.
    """

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Follow generated tokens."""

    def apply_mask(self, allowed_W: np.ndarray) -> None:
        """Clear the bits (`sampling.bits`, uint32) of tokens that may not come next. Other bits may
        be clear already."""


class BadWords:
    """Masks the last token of each word whose other tokens have just been generated."""

    def __init__(self, words: Iterable[tuple[int, ...]]):
        self._by_link: dict[int, list[tuple[int, ...]]] = {}  # words by their last token but one
        longest = 2
        for word in words:
            self._by_link.setdefault(word[-2], []).append(word)
            longest = max(longest, len(word))
        self._recent: deque[int] = deque(maxlen=longest - 1)

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        self._recent.extend(token_ids)

    def apply_mask(self, allowed_W: np.ndarray) -> None:
        """See `Constraint`."""
        if not self._recent:
            return
        recent = tuple(self._recent)
        for word in self._by_link.get(recent[-1], ()):
            if recent[-(len(word) - 1) :] == word[:-1]:
                remove(allowed_W, word[-1])
