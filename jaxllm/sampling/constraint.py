"""What may be said next, decided on the host from what was said. Imports no jax."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxllm.sampling.bits import remove


class ConstraintError(Exception):
    """A constraint cannot go on; the message is for the client. It ends its own request only."""


class Constraint(Protocol):
    """Of one choice, which owns it: follows its tokens and says which may come next.

    The engine calls `advance` with each token that the choice has said, in order, and before each
    draw `mask` once, perhaps in a thread of its own, never both at once. It lives through
    preemptions. Whatever either raises ends the choice with an error.
    """

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were said."""

    def mask(self, allowed_W: np.ndarray) -> None:
        """Clear the bits (`sampling.bits`, uint32) of tokens that must not be said next. Others'
        bits may be clear already."""


class BadWords:
    """Forbids the last token of every word whose other tokens were just said."""

    def __init__(self, words: Iterable[tuple[int, ...]]):
        self._by_link: dict[int, list[tuple[int, ...]]] = {}  # words by their last token but one
        longest = 2
        for word in words:
            self._by_link.setdefault(word[-2], []).append(word)
            longest = max(longest, len(word))
        self._said: deque[int] = deque(maxlen=longest - 1)

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        self._said.extend(token_ids)

    def mask(self, allowed_W: np.ndarray) -> None:
        """See `Constraint`."""
        if not self._said:
            return
        said = tuple(self._said)
        for word in self._by_link.get(said[-1], ()):
            if said[-(len(word) - 1) :] == word[:-1]:
                remove(allowed_W, word[-1])
