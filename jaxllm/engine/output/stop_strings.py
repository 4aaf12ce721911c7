"""Stop strings in a text that arrives in pieces: the first of them ends it, and its possible
beginnings are held back. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class TextStep(msgspec.Struct, frozen=True, gc=False):  # there is one a token
    """Text that is safe to show after some tokens, and the stop string that ended the request, if
    one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Of several, the one that is complete first ends the text, and of these the one that starts
    first: whatever the pieces are.

    The text ends before the stop string, or behind it with `include`; then nothing needs to be held
    back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops, self._include = stops, include
        self._longest = max(map(len, stops), default=0)
        # What the beginning of one can end with
        self._inside = frozenset("".join(stop[:-1] for stop in stops))
        # The end of the text, which may be the start of a stop string; with `include`, it was shown
        self._open = ""

    def feed(self, new: str, may_end: bool = True) -> TextStep:
        """Take a piece. A stop string that is complete by then, and was not before, ends the text
        if it `may_end`."""
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
        """What was held back."""
        held = "" if self._include else self._open
        self._open = ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the stop string that is complete first beyond `old` characters."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        return min(found) if found else None

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text that starts a stop string."""
        if text[-1:] not in self._inside:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
