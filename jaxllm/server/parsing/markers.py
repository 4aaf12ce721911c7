"""Finding markers in text that arrives in pieces."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable

NEWLINES = ("", "\n", "\n\n")  # that belong to the marker behind them


class Markers:
    """A set of markers, none a prefix of another.

    Attributes:
        words: the markers.
        search: finds the leftmost whole marker, or the marker that the text's end cuts.
        hot: finds that in a text that is not empty, or a character that is no plain text; text
            without one is clear.
    """

    def __init__(self, words: Iterable[str], lead: tuple[str, ...] = ("",), also_hot: str = ""):
        """
        `lead`: what may stand before a marker and belong to it, such as `NEWLINES`.
        `also_hot`: more hot characters, as a regex in brackets has them.
        """
        self.words = frozenset(before + word for word in words for before in lead)
        patterns = [*map(_cut_anywhere, sorted(self.words))]
        self.search = re.compile("|".join(patterns) or "(?!)").search
        patterns += [f"[{also_hot}]"] if also_hot else []
        self.hot: Callable[[str], object] = (
            re.compile("|".join(patterns)).search if patterns else operator.not_
        )

    def whole(self, found: re.Match[str]) -> bool:
        """Whether a match is a whole marker."""
        return found.group() in self.words


def _cut_anywhere(word: str) -> str:
    """A regex for a word, or for its beginning at the end of the text."""
    pattern = re.escape(word[-1])
    for character in reversed(word[:-1]):
        pattern = f"{re.escape(character)}(?:\\Z|{pattern})"
    return pattern


NONE = Markers(())
ESCAPED = r"\"\\\x00-\x1f"  # characters that JSON strings do not have
