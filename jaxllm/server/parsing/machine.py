"""A parser whose format is a generator: it reads text with the methods below, and pauses where text
ends. Where the text was cut therefore makes no difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

import msgspec

from jaxllm.server.parsing.markers import Markers, Words
from jaxllm.server.parsing.parts import (
    Part,
    Reasoning,
    Text,
    TextPart,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from jaxllm.server.parsing.values import Follower, Value

MAX_NAME = 256  # characters of a name, of a key, of a header
MAX_UNDECIDED = 1 << 16  # characters of one value that is read before a call is known to be one

_NAME = re.compile(r"[\w.:/-]*").match
_SPACE = re.compile(r"\s*").match

type Reading[T] = Generator[None, None, T]
type Sink = Callable[[str], object]
type Maker = Callable[[str], TextPart]


class Clear(msgspec.Struct, frozen=True):
    """What text becomes that is one part as it stands, and need not be fed.

    Attributes:
        make: makes the part.
        hot: finds what is no such text in one that is not empty.
    """

    make: Maker
    hot: Callable[[str], object]


class Malformed(Exception):
    """The text is no call; it is text."""


def ignore(text: str) -> None:
    """A sink."""


class Machine:
    """Subclasses write `read`: it takes text and emits parts until the text ends.

    Attributes:
        thinking: the text so far ends within reasoning.
        clear: text that need not be fed now; None where all must be.
        over: no reasoning follows, and text passes unchanged from here on.
        new_id: makes ids of name and index, for calls to which the model gave none or an earlier
            one's.
    """

    thinking = False
    over = False
    clear: Clear | None = None
    new_id: Callable[[str, int], str] | None = None

    def __init__(self) -> None:
        self._text = ""  # with `_position`: what was fed and not taken
        self._position = 0
        self._ended = False
        self._parts: list[Part] = []
        self._undecided: list[str] | None = None  # taken and not told; text if no call
        self._recorded: list[str] | None = None  # all that was taken, while parts are dropped
        self._tried: list[str] | None = None  # all that was taken, while it may be put back
        self._index = -1
        self._ids: set[str | None] = set()  # of calls: clients tell them apart by these
        self._in_call = False
        self._reading = self.read()

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after this text."""
        clear = self.clear
        if clear is not None and text and not clear.hot(text):
            return [clear.make(text)]
        self._text = self._text[self._position :] + text
        self._position = 0
        return self._resume()

    @property
    def holding(self) -> bool:
        """Whether text of a thought is held back that may be calls."""
        return False

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._index >= 0

    def finish(self) -> list[Part]:
        """The last parts, when no text follows."""
        self._ended = True
        return self._resume()

    def read(self) -> Reading[None]:
        """The format. Ends only when the text has ended."""
        raise NotImplementedError

    def _resume(self) -> list[Part]:
        self.clear = None
        parts: list[Part] = []
        self._parts = parts
        next(self._reading, None)
        return parts

    # Emitting

    def emit(self, part: Part) -> None:
        """Tells a part, unless text is recorded instead."""
        if self._recorded is None:
            self._parts.append(part)

    def emit_text(self, text: str) -> None:
        """Tells text of the reply."""
        if text:
            self.emit(Text(text))

    def emit_reasoning(self, text: str) -> None:
        """Tells text of the reasoning."""
        if text:
            self.emit(Reasoning(text))

    def start(self, name: str, id: str | None = None) -> None:
        """A call is certain."""
        self._undecided = []
        self._in_call = True
        self._index += 1
        number = self._index
        while self.new_id is not None and (id is None or id in self._ids):
            id = self.new_id(name, number)
            number = number + 1
        self._ids.add(id)
        self.emit(ToolStart(self._index, name, id))

    def arguments(self, text: str) -> None:
        """A fragment, which stands for all that was taken before."""
        if text:
            self._undecided = []
            self.emit(ToolArguments(self._index, text))

    def fragment(self, text: str) -> ToolArguments:
        """The part that `arguments` emits."""
        return ToolArguments(self._index, text)

    def end(self, complete: bool = True) -> None:
        """The call's arguments end. What follows is undecided again."""
        self._in_call = False
        self._undecided = []
        self.emit(ToolEnd(self._index, complete))

    def record(self, taken: str) -> None:
        """From here on parts are dropped and what is taken is recorded, behind what already was."""
        self._recorded = [taken]

    def recorded(self) -> str:
        """What was taken. Parts are told again."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    @property
    def recording(self) -> bool:
        """Whether parts are dropped and text is recorded."""
        return self._recorded is not None

    def attempt(self, call: Reading[None], marker: str) -> Reading[bool]:
        """Reads what may be calls. What is none becomes text, marker included. → whether all that
        was read were whole calls."""
        self._undecided = [marker]
        before = self._index
        whole = True
        try:
            yield from call
        except Malformed:
            rest = "".join(self._undecided or ())
            broken = self._in_call or self._index == before
            if self._in_call:
                self.end(complete=False)
            whole = not broken and not rest.strip()
            if not whole:
                self.emit_text(rest)
        self._undecided = None
        return whole

    def tried(self, reading: Reading[None]) -> Reading[bool]:
        """Reads what emits nothing, or takes nothing where that is malformed. → whether it was
        read. One such reading is never inside another."""
        undecided = None
        if self._undecided is not None:
            undecided = list(self._undecided)
        recorded = None
        if self._recorded is not None:
            recorded = list(self._recorded)
        self._tried = []
        try:
            yield from reading
        except Malformed:
            self._text = "".join(self._tried) + self._text[self._position :]
            self._position = 0
            self._undecided = undecided
            self._recorded = recorded
            return False
        finally:
            self._tried = None
        return True

    def decide(self) -> None:
        """What was taken is no text, whatever follows."""
        self._undecided = None

    # Taking text

    def advance(self, to: int) -> str:
        """Takes the text up to a position."""
        text = self._text[self._position : to]
        self._position = to
        if self._undecided is not None:
            self._undecided.append(text)
        if self._recorded is not None:
            self._recorded.append(text)
        if self._tried is not None:
            self._tried.append(text)
        return text

    def give_back(self, word: str) -> None:
        """Puts back the word that was taken last, in one piece."""
        self._position -= len(word)
        for record in (self._undecided, self._recorded):
            if record and record[-1] == word:
                record.pop()

    def character(self) -> Reading[str]:
        """The next character, not taken; "" at the end."""
        while self._position == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._position]

    def spaces(self) -> Reading[str]:
        """Takes white space. → the next character."""
        while True:
            self.advance(_SPACE(self._text, self._position).end())  # type: ignore[union-attr]
            if self._position < len(self._text) or self._ended:
                return self._text[self._position : self._position + 1]
            yield

    def take(self, *words: str) -> Reading[str | None]:
        """Takes the word that comes next, if one does. No word is a prefix of another."""
        while True:
            for word in words:
                if self._text.startswith(word, self._position):
                    return self.advance(self._position + len(word))
            longest = max(map(len, words), default=0)
            rest = self._text[self._position : self._position + longest]
            if self._ended or not any(word.startswith(rest) for word in words):
                return None
            yield

    def take_one_of(self, words: Words) -> Reading[str | None]:
        """As `take`, of words that may be many."""
        while True:
            text = self._text[self._position : self._position + words.longest]
            word = words.begins(text)
            if word is not None:
                return self.advance(self._position + len(word))
            if self._ended or not words.may_begin(text):
                return None
            yield

    def expect(self, *words: str) -> Reading[str]:
        """White space and one of the words. Raises Malformed."""
        yield from self.spaces()
        word = yield from self.take(*words)
        if word is None:
            raise Malformed
        return word

    def until(
        self, markers: Markers, sink: Sink, clear: Clear | None = None
    ) -> Reading[str | None]:
        """Takes text up to a marker, and the marker. → the marker, None at the end.

        `clear`: what `sink` makes of text that has no marker.
        """
        while True:
            match = markers.search(self._text, self._position)
            if match is None:
                sink(self.advance(len(self._text)))
            else:
                sink(self.advance(match.start()))
                if markers.whole(match):
                    return self.advance(match.end())
            if self._ended:
                sink(self.advance(len(self._text)))
                return None
            if self._position == len(self._text):
                self.clear = clear
            yield

    def thought(self, ends: Markers) -> Reading[str | None]:
        """Takes reasoning up to a marker, and the marker. → the marker, None at the end."""
        return self.until(ends, self.emit_reasoning, Clear(Reasoning, ends.hot))

    def matching(self, pattern: Callable[[str, int, int], re.Match[str] | None]) -> Reading[str]:
        """Takes the characters of a set. Raises Malformed after `MAX_NAME`."""
        taken = ""
        while True:
            most = self._position + MAX_NAME - len(taken)
            match = pattern(self._text, self._position, most)
            taken += self.advance(match.end())  # type: ignore[union-attr]
            if len(taken) == MAX_NAME:
                raise Malformed
            if self._position < len(self._text) or self._ended:
                return taken
            yield

    def name(self) -> Reading[str]:
        """Takes the name of a tool. Raises Malformed."""
        name = yield from self.matching(_NAME)
        if not name:
            raise Malformed
        return name

    def value(self, sink: Sink, most: int | None = None, python: bool = False) -> Reading[None]:
        """Takes a JSON value of at most so many characters. Raises Malformed."""
        yield from self.follow(Value(python), sink, most)

    def follow(self, value: Follower, sink: Sink, most: int | None = None) -> Reading[None]:
        """Takes what a follower reads, at most so many characters. Raises Malformed."""
        left = most
        while True:
            if left is None:
                end = len(self._text)
            else:
                end = min(len(self._text), self._position + left)
            before = self._position
            position, written = value.read(self._text, before, end)
            self.advance(position)
            sink(written)
            if left is not None:
                left -= position - before
            if value.done:
                return
            if self._ended:
                value.end()
            if value.failed and self._in_call:
                self._undecided = [value.pending]
            elif self._ended and not value.failed:
                sink(value.pending)
            if value.failed or self._ended or left == 0:
                raise Malformed
            if sink == self.arguments and not self._undecided:
                hot = value.hot
                if hot is None:
                    self.clear = None
                else:
                    self.clear = Clear(self.fragment, hot)
            yield
