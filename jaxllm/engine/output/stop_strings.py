"""Stop strings in a text that arrives in pieces. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class TextStep(msgspec.Struct, frozen=True, gc=False):  # made for every token
    """New text of some tokens that may be sent.

    Attributes:
        text: without anything that could become a stop string.
        stop: the stop string that ended the text.
    """

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the first stop string, and holds back text that may be the start of one.

    The stop string that is complete first ends the text; of several, the one that starts first.
    How the text is cut into pieces does not matter. The text ends before the stop string, or after
    it with `include`; then nothing is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops, self._include = stops, include
        self._longest = max(map(len, stops), default=0)
        # Characters that the start of a stop string can end with
        self._inside = frozenset("".join(stop[:-1] for stop in stops))
        # The end of the text, where it may start a stop string; with `include` it is sent already
        self._open = ""

    def feed(self, new: str, may_end: bool = True) -> TextStep:
        """Add a piece. A stop string that is complete with it ends the text if it `may_end`."""
        text = self._open + new
        shown = len(self._open) if self._include else 0
        hit = self._first(text, len(self._open)) if may_end else None
        if hit is not None:
            end, start, stop = hit
            self._open = ""
            return TextStep(text[shown : end if self._include else start], stop)
        size = self._beginning(text)
        self._open = text[len(text) - size :]
        return TextStep(text[shown:] if self._include else text[: len(text) - size])

    def finish(self) -> str:
        """The text that was held back."""
        held = "" if self._include else self._open
        self._open = ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first stop string that ends after `old` characters."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        return min(found) if found else None

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix of the text that starts a stop string."""
        if text[-1:] not in self._inside:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
