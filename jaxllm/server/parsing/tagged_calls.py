"""Calls whose arguments are tagged text: one tag a key, values without quotes. Types come from the
tool's schema."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from jaxllm.grammar.pieces import Arguments, Layout, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.markers import ESCAPED, Markers
from jaxllm.server.parsing.pieces import NEW_KEY, Section
from jaxllm.server.parsing.schema import Schema, is_string, property_of, typed
from jaxllm.server.parsing.values import encode_string

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

    def __init_subclass__(cls) -> None:
        tags = cls.tags
        cls.open = tuple(filter(None, (tags.calls, tags.call)))
        cls.close = tuple(filter(None, (tags.calls_end,)))
        cls.section = Section(between="\n")
        cls.key_markers = Markers((tags.value,))
        cls.value_markers = Markers(
            (tags.value_end,), lead=("", "\n") if tags.lines else ("",), also_hot=ESCAPED
        )
        super().__init_subclass__()

    def call(self, marker: str) -> Reading[None]:
        tags = self.tags
        if marker != tags.call and tags.call:
            yield from self.expect(tags.call)
        yield from self.spaces()
        name = yield from self.name()
        if tags.named:
            yield from self.expect(tags.named)
        next_tag = yield from self.expect(tags.key, tags.call_end)
        self.start(name)
        before = "{"
        while next_tag == tags.key:
            yield from self.argument(name, before)
            before = ", "
            next_tag = yield from self.expect(tags.key, tags.call_end)
        self.arguments("{}" if before == "{" else "}")
        self.end()

    def argument(self, tool: str, before: str) -> Reading[None]:
        """Key and value from behind the key's tag; strings stream. Raises Malformed."""
        pieces: list[str] = []
        if (yield from self.until(self.key_markers, pieces.append)) is None:
            raise Malformed
        if self.tags.value_begin:
            yield from self.expect(self.tags.value_begin)
        if self.tags.lines:
            yield from self.take("\n")
        key = "".join(pieces).strip()
        self.arguments(f"{before}{encode_string(key)}: ")
        root = self.tools.get(tool)
        schema = property_of(root, key, root)
        if is_string(schema, root):
            self.arguments('"')
            yield from self.string_text(self.value_markers)
            self.arguments('"')
        else:
            pieces.clear()
            if (yield from self.until(self.value_markers, pieces.append)) is None:
                raise Malformed
            self.arguments(typed("".join(pieces), schema, root))

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        tags = cls.tags
        line = "\n" if tags.lines else ""
        around = (f"{tags.value}{tags.value_begin}{line}", f"{line}{tags.value_end}\n")
        layout = Layout(
            before_key=tags.key,
            text=around,
            json=around,
            key=KEY,
            new_key=NEW_KEY,
            ends_key=(tags.value,),
            ends_text=(tags.value_end, tags.key),
        )
        head = f"{tags.calls}\n{tags.call}{name}{tags.named}\n".replace(">\n\n", ">\n")
        tail = "\n".join(filter(None, (tags.call_end, tags.calls_end)))
        return (Literal(head), Arguments(schema, layout), Literal(tail))
