"""Calls whose arguments are tagged text: one tag a key, values without quotes. Types come from the
tool's schema."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import ClassVar

import msgspec

from jaxllm.grammar.pieces import Arguments, Either, Layout, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser, blank_value
from jaxllm.server.parsing.machine import Clear, Malformed, Reading, Sink
from jaxllm.server.parsing.markers import ESCAPED, Markers, Words
from jaxllm.server.parsing.pieces import NEW_KEY, Section
from jaxllm.server.parsing.schema import Schema, is_string, properties, property_of, typed
from jaxllm.server.parsing.values import encode_string

# Keys that are read as they are written: of one line, without white space around them
KEY = r"(\S([^\x00-\x1f\x7f]{0,253}\S)?)"


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The tags, in their order: calls, call, the name, named, key, the key, value, value_begin, the
    value, value_end, call_end, calls_end. Empty ones are not written.

    Attributes:
        lines: a value stands on lines of its own.
        breaks: what models write between tags, one or the other throughout a call.
    """

    calls: str
    call: str
    named: str
    key: str
    value: str
    value_begin: str = ""
    value_end: str
    call_end: str
    calls_end: str
    lines: bool = False
    breaks: tuple[str, ...] = ("\n",)


class TaggedCalls(ToolParser):
    """Subclasses only say `tags`."""

    tags: ClassVar[Tags]
    value_markers: ClassVar[Markers]
    key_markers: ClassVar[Markers]
    closers: ClassVar[tuple[str, ...]]  # of a call

    def __init_subclass__(cls) -> None:
        tags = cls.tags
        cls.open = tuple(filter(None, (tags.calls, tags.call)))
        cls.close = tuple(filter(None, (tags.calls_end,)))
        cls.section = Section(between="\n")
        cls.key_markers = Markers((tags.value,))
        cls.closers = tuple(filter(None, (tags.call_end, tags.calls_end)))
        leads = ("", "\n") if tags.lines else ("",)
        ends = [lead + tags.value_end for lead in leads]
        cls.value_markers = Markers((*ends, "\n" + tags.key), also_hot=ESCAPED)
        super().__init_subclass__()

    def call(self, marker: str) -> Reading[None]:
        tags = self.tags
        if marker != tags.call and tags.call:
            yield from self.expect(tags.call)
        yield from self.spaces()
        name = yield from self.name()
        if tags.named:
            yield from self.expect(tags.named)
        tag = yield from self.expect(tags.key, *self.closers)
        self.start(name)
        keys: set[str] = set()
        before = "{"
        while tag == tags.key:
            key: str | None = yield from self.key()
            while key is not None:
                keys.add(key)
                value, key = yield from self.argument(name, key, before, keys)
                if value:
                    before = ", "
            tag = yield from self.expect(tags.key, *self.closers, *self.open)
        if tag in self.open:  # of the next call: this one's closers are missing
            self.give_back(tag)
        self.arguments("{}" if before == "{" else "}")
        self.end()

    def key(self) -> Reading[str]:
        """A key from behind its tag. Raises Malformed."""
        pieces: list[str] = []
        if (yield from self.until(self.key_markers, pieces.append)) is None:
            raise Malformed
        return "".join(pieces).strip()

    def argument(
        self, tool: str, key: str, before: str, keys: Set[str]
    ) -> Reading[tuple[bool, str | None]]:
        """A value from behind its key; strings stream. Raises Malformed.

        `keys`: of all arguments so far.

        → whether there is a value, and the key whose tag was taken at its end, if its own closer is
        missing. Blank text is no value of a type that is not text, but null where that may be.
        """
        root = self.tools.get(tool)
        schema = property_of(root, key, root)
        head = f"{before}{encode_string(key)}: "
        if self.tags.value_begin:
            yield from self.expect(self.tags.value_begin)
        others = (name for name in properties(root) if name not in keys)
        if is_string(schema, root):
            self.arguments(head + '"')
            sink = lambda text: self.arguments(encode_string(text)[1:-1])
            passing = Clear(self.fragment, self.value_markers.hot)
            next_key = yield from self.value_text(others, sink, passing)
            self.arguments('"')
            return True, next_key
        pieces: list[str] = []
        next_key = yield from self.value_text(others, pieces.append, json=True)
        text = "".join(pieces)
        value: str | None
        if text.strip():
            value = typed(text, schema, root)
        else:
            value = blank_value(text, schema, root)
        if value is not None:
            self.arguments(head + value)
        return value is not None, next_key

    def value_text(
        self, others: Iterable[str], sink: Sink, clear: Clear | None = None, json: bool = False
    ) -> Reading[str | None]:
        """The text of a value. Raises Malformed.

        It ends at its closer; or, as models forget that, at a line that opens the parameter of one
        of the `others`: those that are declared and not given yet. → that one. `json`: tags within
        the texts of an object or a list are text.
        """
        tags = self.tags
        openings: Words | None = None  # made where it is needed: there may be many
        marker: str | None = None
        if tags.lines and (yield from self.take("\n")) is not None:
            marker = yield from self.take(tags.key)
        if json and marker is None and (yield from self.character()) in ("{", "["):
            written: list[str] = []
            if (yield from self.tried(self.value(written.append))):
                sink("".join(written))
        while True:
            if marker is not None:
                if openings is None:  # no key holds what ends it
                    names = (name for name in others if tags.value not in name)
                    openings = Words(name + tags.value for name in names)
                opened = yield from self.take_one_of(openings)
                if opened is not None:
                    return opened.removesuffix(tags.value)
                sink(marker)
            marker = yield from self.until(self.value_markers, sink, clear)
            if marker is None:
                raise Malformed
            if not marker.endswith(tags.key):
                return None

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        options = [cls._pieces(name, schema, gap) for gap in cls.tags.breaks]
        if len(options) > 1:
            return (Literal(cls.tags.calls), Either(tuple(options)))
        head, arguments, tail = options[0]
        return (Literal(cls.tags.calls + head.text), arguments, tail)

    @classmethod
    def _pieces(cls, name: str, schema: Schema, gap: str) -> tuple[Literal, Arguments, Literal]:
        """One call from behind the tag of calls, with `gap` between tags."""
        tags = cls.tags
        line = ""
        if tags.lines:
            line = "\n"
        if tags.value_begin:
            value_begin = gap + tags.value_begin
        else:
            value_begin = line
        around = (tags.value + value_begin, f"{line}{tags.value_end}{gap}")
        layout = Layout(
            before_key=tags.key,
            text=around,
            json=around,
            key=KEY,
            new_key=NEW_KEY,
            ends_key=(tags.value,),
            ends_text=(tags.value_end, tags.key),
        )
        call = ""
        if tags.call:
            call = gap + tags.call
        head = f"{call}{name}{tags.named}{gap}"
        tail = gap.join(filter(None, (tags.call_end, tags.calls_end)))
        return (Literal(head), Arguments(schema, layout), Literal(tail))
