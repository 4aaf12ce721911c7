"""Whether the pattern of a JSON schema is found in a short text: of patterns that are simple enough
to be tried wherever a name is read."""

from __future__ import annotations

import functools
import re

MAX_TEXT = 256  # characters in which a pattern is sought
MAX_PATTERN = 512  # characters of one that is tried

MAX_VARIABLE = 3  # quantifiers that allow several numbers, at most one of them a large number

# Characters and classes with how often they may come, and lists of words. No group repeats, so that
# a search looks at each place of a text at most some hundred times
_ATOM = re.compile(
    r"(?:\\[dw.\\/$^*+?()\[\]{}|-]|\[\^?(?:[^\[\]\\]|\\[dw.\\/$^*+?()\[\]{}|-])+\]|[^\\.^$|?*+()\[\]{}]|\.)"
    r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?"
    r"|\((?:\?:)?[\w|-]*\)"
)
_VARIABLE = re.compile(r"[*+?]|,")
_UNBOUNDED = re.compile(r"[*+]|,\}|\d\d")


@functools.lru_cache(maxsize=1024)
def _simple(pattern: str) -> re.Pattern[str] | None:
    """The pattern for Python; None for one that is not tried."""
    if len(pattern) > MAX_PATTERN:
        return None
    inner = pattern.removeprefix("^")
    ends = inner.endswith("$") and not inner.endswith("\\$")
    if ends:
        inner = inner[:-1]
    position = 0
    variable = 0
    unbounded = 0
    while position < len(inner):
        atom = _ATOM.match(inner, position)
        if atom is None:
            return None
        variable += _VARIABLE.search(atom.group(), 1) is not None
        unbounded += _UNBOUNDED.search(atom.group(), 1) is not None
        position = atom.end()
    if variable > MAX_VARIABLE or unbounded > 1:
        return None
    start = "^" if pattern.startswith("^") else ""
    return re.compile(start + inner + (r"\Z" if ends else ""), re.ASCII)


def found_in(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None where that is not tried."""
    # What letters are beyond ASCII is not the same everywhere
    known = len(text) <= MAX_TEXT and (text.isascii() or "\\w" not in pattern)
    compiled = _simple(pattern) if known else None
    if compiled is None:
        return None
    return compiled.search(text) is not None
