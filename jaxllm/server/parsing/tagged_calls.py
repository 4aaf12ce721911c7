"""Calls whose arguments are tagged text: one tag a key, values without quotes. Types come from the
tool's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import ClassVar

import msgspec

from jaxllm.grammar.pieces import Arguments, Layout, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser, blank_value
from jaxllm.server.parsing.machine import Clear, Malformed, Reading, Sink
from jaxllm.server.parsing.markers import ESCAPED, Markers
from jaxllm.server.parsing.pieces import NEW_KEY, Section
from jaxllm.server.parsing.schema import Schema, is_string, properties, property_of, typed
from jaxllm.server.parsing.values import Value, encode_string

# Keys that are read as they are written: of one line, without white space around them
KEY = r"(\S([^\x00-\x1f\x7f]{0,253}\S)?)"


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The tags, in their order: calls, call, the name, named, key, the key, value, value_begin, the
    value, value_end, call_end, calls_end. Empty ones are not written.

    Attributes:
        lines: a value stands on lines of its own.
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
        given: set[str] = set()
        before = "{"
        while tag == tags.key:
            key: str | None = yield from self.key()
            while key is not None:
                given.add(key)
                value, key = yield from self.argument(name, key, before, given)
                before = ", " if value else before
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
        self, tool: str, key: str, before: str, given: Set[str]
    ) -> Reading[tuple[bool, str | None]]:
        """A value from behind its key; strings stream. Raises Malformed.

        → whether there is a value, and the key whose tag was taken at its end, if its own closer is
        missing. Blank text is no value of a type that is not text, but null where that may be.
        """
        root = self.tools.get(tool)
        schema = property_of(root, key, root)
        head = f"{before}{encode_string(key)}: "
        if self.tags.value_begin:
            yield from self.expect(self.tags.value_begin)
        others = (name for name in properties(root) if name not in given)
        if is_string(schema, root):
            self.arguments(head + '"')
            sink = lambda text: self.arguments(encode_string(text)[1:-1])
            passing = Clear(self.fragment, self.value_markers.hot)
            next_key = yield from self.value_text(others, sink, passing)
            self.arguments('"')
            return True, next_key
        pieces: list[str] = []
        followed = Value()

        def follow(text: str) -> None:
            pieces.append(text)
            followed.read(text, 0, len(text))

        next_key = yield from self.value_text(others, follow, inside=lambda: followed.quoting)
        text = "".join(pieces)
        value = typed(text, schema, root) if text.strip() else blank_value(text, schema, root)
        if value is not None:
            self.arguments(head + value)
        return value is not None, next_key

    def value_text(
        self,
        others: Iterable[str],
        sink: Sink,
        clear: Clear | None = None,
        inside: Callable[[], bool] = bool,
    ) -> Reading[str | None]:
        """The text of a value. Raises Malformed.

        It ends at its closer; or, as models forget that, at a line that opens the parameter of one
        of the `others`: those that are declared and not given yet. → that one. A closer that
        stands in a line `inside` a string of JSON belongs to the string.
        """
        tags = self.tags
        openings: dict[str, str] = {}  # made where it is needed: there may be many
        marker: str | None = None
        if tags.lines and (yield from self.take("\n")) is not None:
            marker = yield from self.take(tags.key)
        while True:
            if marker is not None and marker.endswith(tags.key):
                openings = openings or {name + tags.value: name for name in others}
                opened = yield from self.take(*openings)
                if opened is not None:
                    return openings[opened]
            elif marker is not None and not (marker == tags.value_end and inside()):
                return None
            sink(marker or "")
            marker = yield from self.until(self.value_markers, sink, clear)
            if marker is None:
                raise Malformed

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        tags = cls.tags
        line = "\n" if tags.lines else ""
        value_begin = f"\n{tags.value_begin}" if tags.value_begin else ""
        around = (f"{tags.value}{value_begin}{line}", f"{line}{tags.value_end}\n")
        layout = Layout(
            before_key=tags.key,
            text=around,
            json=around,
            key=KEY,
            new_key=NEW_KEY,
            ends_key=(tags.value,),
            ends_text=(tags.value_end, tags.key),
        )
        call = f"\n{tags.call}" if tags.call else ""
        head = f"{tags.calls}{call}{name}{tags.named}\n"
        tail = "\n".join(filter(None, (tags.call_end, tags.calls_end)))
        return (Literal(head), Arguments(schema, layout), Literal(tail))
