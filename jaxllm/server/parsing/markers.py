"""Finding markers in text that arrives in pieces."""

from __future__ import annotations

import bisect
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

    def whole(self, match: re.Match[str]) -> bool:
        """Whether a match is a whole marker."""
        return match.group() in self.words


class Words:
    """Words with which a text may begin, none a prefix of another. Thousands of them are told apart
    as fast as a few.

    Attributes:
        longest: characters of the longest word.
    """

    def __init__(self, words: Iterable[str]):
        self._words = sorted(words)
        self.longest = max(map(len, self._words), default=0)

    def begins(self, text: str) -> str | None:
        """The word with which the text begins."""
        # Words behind it in their order are greater than the text; no other is between the two
        place = bisect.bisect_right(self._words, text) - 1
        if place >= 0 and text.startswith(self._words[place]):
            return self._words[place]
        return None

    def may_begin(self, text: str) -> bool:
        """Whether the text, which is no more than this so far, is the beginning of a word."""
        place = bisect.bisect_left(self._words, text)
        return place < len(self._words) and self._words[place].startswith(text)


def _cut_anywhere(word: str) -> str:
    """A regex for a word, or for its beginning at the end of the text."""
    pattern = re.escape(word[-1])
    for character in reversed(word[:-1]):
        pattern = f"{re.escape(character)}(?:\\Z|{pattern})"
    return pattern


NONE = Markers(())
ESCAPED = r"\"\\\x00-\x1f"  # characters that JSON strings do not have
