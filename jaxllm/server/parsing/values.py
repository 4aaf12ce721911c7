"""Follows one JSON or Python value through text that arrives in pieces, and writes it as JSON.

Output is valid JSON up to where it stops. Repaired, without change of meaning: raw control
characters and unknown escapes in strings, trailing commas, Python's names of constants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

MAX_SCALAR = 1024  # characters of a number

_SPACE = re.compile(r"[ \t\r\n]*").match
_WORD = re.compile(r"[-+.\w]*").match
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII).fullmatch


def _as_it_stands(quote: str) -> str:
    """A regex for what stands between quotes and is written as it is, escapes included."""
    plain = rf"[^{quote}\\\x00-\x1f]*+"
    return rf"""{plain}(?:\\["\\bfnrt]{plain})*+"""


_QUOTES = {'"': '"', "'": "'\""}  # and what is no plain character between them
_PLAIN = {quote: re.compile(_as_it_stands(no)).match for quote, no in _QUOTES.items()}
_HOT = {quote: re.compile(rf"(?!{_as_it_stands(no)}\Z)").match for quote, no in _QUOTES.items()}
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)").sub
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]").match
_CONSTANTS = {"true": "true", "false": "false", "null": "null"} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_HEX_DIGITS = {"u": 4}
_PYTHON_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {c: "\\" + c for c in '"\\/bfnrt'} | {"'": "'"}
_PYTHON_ESCAPES = {c: "\\" + c for c in '"\\bfnrt'} | {
    "'": "'",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}

encode_string: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


class Follower(Protocol):
    """What follows a value through text.

    Attributes:
        done: the value is complete.
        failed: what stands at the position is no part of it.
    """

    done: bool
    failed: bool

    def read(self, text: str, position: int, end: int) -> tuple[int, str]:
        """Reads up to `end`, or less when done or failed. → position, JSON written."""
        ...

    def end(self) -> None:
        """No text follows."""
        ...

    @property
    def hot(self) -> Callable[[str], object] | None:
        """Finds what is not written as it stands in text within a string; None outside one."""
        ...

    @property
    def pending(self) -> str:
        """Characters that are read and not written."""
        ...


class Value:
    """One value. Strings may be quoted as in Python if `python`.

    Attributes:
        done: the value is complete.
        failed: what stands at the position is no part of a value.
    """

    def __init__(self, python: bool = False):
        self.done = self.failed = False
        self._partial = ""  # of a number or an escape
        if python:
            self._quotes = "\"'"
        else:
            self._quotes = '"'
        if python:
            self._escapes = _PYTHON_ESCAPES
        else:
            self._escapes = _ESCAPES
        if python:
            self._hex_digits = _PYTHON_HEX_DIGITS
        else:
            self._hex_digits = _HEX_DIGITS
        self._closers: list[str] = []
        self._comma: list[str] = []  # and its white space; dropped if a bracket closes next
        self._may_close = False
        self._is_key = False
        self._plain = _PLAIN['"']
        self._quote = '"'
        self._step: Callable[[str, int, int, list[str]], int] = self._value

    def read(self, text: str, position: int, end: int) -> tuple[int, str]:
        """Reads up to `end`, or less when done or failed. → position, JSON written."""
        out: list[str] = []
        while position < end and not (self.done or self.failed):
            position = self._step(text, position, end, out)
        return position, "".join(out)

    @property
    def hot(self) -> Callable[[str], object] | None:
        """Finds what is not written as it stands in text within a string; None outside one."""
        if self._step == self._string:
            return _HOT[self._quote]
        return None

    def end(self) -> None:
        """No text follows: a value that is not done stays so."""

    @property
    def pending(self) -> str:
        """Characters that are read and not written."""
        return "".join(self._comma) + self._partial

    def _fail(self, position: int) -> int:
        self.failed = True
        return position

    def _after_space(self, text: str, position: int, end: int, out: list[str]) -> int:
        stop = _SPACE(text, position, end).end()  # type: ignore[union-attr]
        if stop > position:
            (self._comma or out).append(text[position:stop])
        return stop

    def _value(self, text: str, position: int, end: int, out: list[str]) -> int:
        position = self._after_space(text, position, end, out)
        if position == end:
            return position
        char = text[position]
        if self._may_close and char == self._closers[-1]:
            return self._close(char, position, out)
        if not (char in self._quotes or char in "{[-" or char.isalnum()):
            return self._fail(position)
        self._write_comma(out)
        if char in self._quotes:
            return self._open_string(char, position, out)
        if char not in "{[":
            self._step = self._scalar
            return position
        out.append(char)
        self._closers.append("}" if char == "{" else "]")
        self._may_close = True
        if char == "{":
            self._step = self._key
        else:
            self._step = self._value
        return position + 1

    def _key(self, text: str, position: int, end: int, out: list[str]) -> int:
        position = self._after_space(text, position, end, out)
        if position == end:
            return position
        char = text[position]
        if char == "}":
            return self._close(char, position, out)
        if char not in self._quotes:
            return self._fail(position)
        self._write_comma(out)
        self._is_key = True
        return self._open_string(char, position, out)

    def _colon(self, text: str, position: int, end: int, out: list[str]) -> int:
        position = self._after_space(text, position, end, out)
        if position == end:
            return position
        if text[position] != ":":
            return self._fail(position)
        out.append(":")
        self._may_close = False
        self._step = self._value
        return position + 1

    def _next(self, text: str, position: int, end: int, out: list[str]) -> int:
        position = self._after_space(text, position, end, out)
        if position == end:
            return position
        char = text[position]
        if char == self._closers[-1]:
            return self._close(char, position, out)
        if char != ",":
            return self._fail(position)
        self._comma = [","]
        self._may_close = True
        if self._closers[-1] == "}":
            self._step = self._key
        else:
            self._step = self._value
        return position + 1

    def _write_comma(self, out: list[str]) -> None:
        out += self._comma
        self._comma = []

    def _close(self, char: str, position: int, out: list[str]) -> int:
        self._comma = []
        self._closers.pop()
        out.append(char)
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self.done = not self._closers
        self._step = self._next

    def _scalar(self, text: str, position: int, end: int, out: list[str]) -> int:
        stop = _WORD(text, position, min(end, position + MAX_SCALAR - len(self._partial))).end()  # type: ignore[union-attr]
        self._partial += text[position:stop]
        if stop == end and len(self._partial) < MAX_SCALAR:
            return stop
        if not _NUMBER(self._partial) and self._partial not in _CONSTANTS:
            return self._fail(stop)
        out.append(_CONSTANTS.get(self._partial, self._partial))
        self._partial = ""
        self._end_value()
        return stop

    def _open_string(self, quote: str, position: int, out: list[str]) -> int:
        out.append('"')
        self._quote = quote
        self._plain = _PLAIN[quote]
        self._step = self._string
        return position + 1

    def _string(self, text: str, position: int, end: int, out: list[str]) -> int:
        stop = self._plain(text, position, end).end()  # type: ignore[union-attr]
        if stop > position:
            out.append(text[position:stop])
        if stop == end:
            return stop
        char = text[stop]
        if char == self._quote:
            out.append('"')
            if self._is_key:
                self._is_key = False
                self._step = self._colon
            else:
                self._end_value()
        elif char == "\\":
            self._partial = char
            self._step = self._escape
        else:
            out.append(encode_string(char)[1:-1])
        return stop + 1

    def _escape(self, text: str, position: int, end: int, out: list[str]) -> int:
        char = text[position]
        if char in self._hex_digits:
            self._partial += char
            self._step = self._hex
            return position + 1
        self._partial = ""
        self._step = self._string
        if char in self._escapes:
            out.append(self._escapes[char])
            return position + 1
        out.append("\\\\")  # no escape: the backslash means itself
        return position

    def _hex(self, text: str, position: int, end: int, out: list[str]) -> int:
        char = text[position]
        wanted = self._hex_digits[self._partial[1]] + 2
        if char in "0123456789abcdefABCDEF":
            self._partial += char
            position += 1
            if len(self._partial) < wanted:
                return position
            number = int(self._partial[2:], 16)
            written = None
            if number < 0x10000:
                written = f"\\u{number:04x}"
            if written is None and number < 0x110000:
                written = chr(number)
        else:
            written = None
        out.append("\\" + self._partial if written is None else written)
        self._partial = ""
        self._step = self._string
        return position


class EncodedObject:
    """An object that is encoded twice: as a JSON string whose text is the object's JSON. Blank text
    and null stand for the empty object. A string of another text is read to its end, then fails.

    Attributes:
        done: the string is complete, and its text is an object.
        failed: its text is none.
    """

    hot = None

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._string = Value()
        self._object = Value()
        self._begun = False  # the quote is read
        self._opened = False  # the object's brace is read
        self._broken = False  # the text is no object
        self._text = ""  # of the string, not followed yet
        self._told = False  # the object's brace is written, which waits for what follows it
        self._held = ""  # of the object's JSON, not written yet

    def read(self, text: str, position: int, end: int) -> tuple[int, str]:
        """Reads up to `end`, or less when done or failed. → position, JSON written."""
        position, quoted = self._string.read(text, position, end)
        if quoted and not self._begun:
            self._begun = True
            quoted = quoted[1:]
        self._text += decoded(quoted[:-1] if self._string.done else quoted)
        if not self._broken:
            self._follow()
        if self._string.done:
            self.done = self._object.done and not self._broken
            self.failed = not self.done
        if self._held == "{" and not self._told:
            return position, ""
        written = self._held
        self._told = self._told or bool(written)
        self._held = ""
        return position, written

    def end(self) -> None:
        """No text follows."""
        self.failed = self.failed or self._broken

    @property
    def pending(self) -> str:
        """Characters that are read and not written."""
        if self.failed:
            return self._held + self._object.pending + self._text
        if self._opened:
            return self._held + self._object.pending + self._string.pending
        return ""

    def _follow(self) -> None:
        """Follows the object through the string's text."""
        if not self._opened:
            self._text = self._text.lstrip()
            word = self._text.rstrip()
            if self._string.done and word in ("", "null"):
                self._text = "{}"
            self._opened = self._text.startswith("{")
            self._broken = not self._opened and not "null".startswith(word)
        if self._opened and not self._object.done:
            read, written = self._object.read(self._text, 0, len(self._text))
            self._held += written
            self._text = self._text[read:]
        if self._object.done:
            self._text = self._text.lstrip()
            self._broken = bool(self._text)
        self._broken = self._broken or self._object.failed


def decoded(quoted: str) -> str:
    """The text that the inside of a JSON string means. Halves of surrogate pairs stay escapes, as
    they come apart."""
    if not quoted:
        return ""
    text: str = json.loads(f'"{_ESCAPE(_kept, quoted)}"')
    return text


def _kept(escape: re.Match[str]) -> str:
    """An escape, or an escaped one of a surrogate."""
    if _SURROGATE(escape[0]):
        return "\\" + escape[0]
    return escape[0]


def as_json(text: str, python: bool = False) -> str | None:
    """A whole text that is one value, as JSON; None if it is not."""
    value = Value(python)
    position, written = value.read(text + " ", 0, len(text) + 1)
    if value.done and not text[position:].strip():
        return written
    return None
