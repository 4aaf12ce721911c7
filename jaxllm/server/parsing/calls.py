"""What formats of tool calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from jaxllm.grammar.pieces import Either, FreeText, Json, Literal, Pieces
from jaxllm.server.parsing.machine import (
    MAX_UNDECIDED,
    Machine,
    Malformed,
    Reading,
    ignore,
)
from jaxllm.server.parsing.markers import NEWLINES, Markers
from jaxllm.server.parsing.parts import Text
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema, Tools
from jaxllm.server.parsing.values import encode_string

_PLAIN = re.compile(r"[^\"\\\x00-\x1f]*").match


class ToolParser(Machine):
    """A format of tool calls. Subclasses say `open` and write `call`.

    Attributes:
        aliases: other names of the format.
        signs: texts that a chat template of this format has, all of them.
        special: markers that are special tokens; if there are any, text must be made with
            skip_special_tokens off.
        ids: style of ids for calls: "call", "mistral" or "kimi".
        open: markers with which calls begin; newlines before them belong to them.
        close: markers that may follow a call and belong to it.
        section: what surrounds all calls of an output, for grammars.
        several: an output may have several calls.
        numbered: the text of a call has its number, which a grammar cannot count.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    special: ClassVar[tuple[str, ...]] = ()
    ids: ClassVar[str] = "call"
    open: ClassVar[tuple[str, ...]] = ()
    close: ClassVar[tuple[str, ...]] = ()
    section: ClassVar[Section] = Section()
    several: ClassVar[bool] = True
    numbered: ClassVar[bool] = False
    markers: ClassVar[Markers]

    def __init_subclass__(cls) -> None:
        cls.markers = Markers(cls.open, lead=NEWLINES)

    def __init__(self, tools: Tools, new_id: Callable[[str, int], str] | None = None):
        """
        `tools`: schemas of the arguments, by name.
        `new_id`: makes ids of name and index, for calls to which the model gave none.
        """
        super().__init__()
        self.tools = tools
        self.new_id = new_id

    def read(self) -> Reading[None]:
        """Text and calls in turn."""
        while True:
            marker = yield from self.until(self.markers, self.emit_text, Text)
            if marker is None:
                return
            if (yield from self.attempt(self.call(marker.lstrip("\n")), marker)):
                yield from self.after()

    def call(self, marker: str) -> Reading[None]:
        """One call or several, from behind the marker. Raises Malformed."""
        raise NotImplementedError

    def after(self) -> Reading[None]:
        """Takes what may stand behind a call: white space, one brace too many, closing markers."""
        while (yield from self.spaces()) == "}":
            yield from self.take("}")
        while self.close and (yield from self.take(*self.close)) is not None:
            yield from self.spaces()

    def json_arguments(self) -> Reading[None]:
        """The rest of a started call, whose arguments stand there as JSON. Raises Malformed."""
        yield from self.value(self.arguments)
        self.end()

    def json_call(self, known: bool = False, opened: bool = False) -> Reading[None]:
        """One object with a name and arguments. Raises Malformed.

        The order of keys does not matter. `known`: only of a tool that is there. `opened`: from
        behind its brace.
        """
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        done = False
        if not opened:
            yield from self.expect("{")
        while True:
            yield from self.expect('"')
            key = yield from self.short_string()
            yield from self.expect(":")
            char = yield from self.spaces()
            if key == "name" and char == '"' and name is None:
                yield from self.take('"')
                name = yield from self.short_string()
                if not name or (known and name not in self.tools):
                    raise Malformed
                if early is not None:
                    self.start(name)
                    self.arguments("".join(early))
                    self.end()
                    done = True
            elif key in ("arguments", "parameters") and char == "{" and not done and early is None:
                if name is None:
                    early = []
                    yield from self.value(early.append, MAX_UNDECIDED)
                else:
                    self.start(name)
                    yield from self.json_arguments()
                    done = True
            elif key == "type":
                yield from self.expect('"function"')
            elif key == "id":  # nobody knows it yet; the call gets one of ours
                yield from self.value(ignore, MAX_UNDECIDED)
            else:
                raise Malformed
            if (yield from self.expect(",", "}")) == "}":
                break
        if not done:
            raise Malformed

    def json_calls(self) -> Reading[None]:
        """A list of such objects, from its bracket on. Raises Malformed."""
        yield from self.expect("[")
        while True:
            yield from self.json_call()
            if (yield from self.expect(",", "]")) == "]":
                return

    def string_text(self, end: Markers) -> Reading[None]:
        """Text up to a marker, as the inside of a JSON string. Raises Malformed."""
        sink = lambda text: self.arguments(encode_string(text)[1:-1])
        if (yield from self.until(end, sink, self.fragment)) is None:
            raise Malformed

    def short_string(self) -> Reading[str]:
        """A JSON string behind its quote. Raises Malformed."""
        text = yield from self.matching(_PLAIN)
        if (yield from self.take('"')) is None:
            raise Malformed
        return text

    @classmethod
    def ends_thought(cls) -> tuple[str, ...]:
        """Markers of calls that end reasoning which was not closed."""
        return cls.special

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        """What a grammar must produce for one call of a tool.

        `number`: how many calls the conversation had before.
        """
        raise NotImplementedError

    @classmethod
    def free_pieces(cls, calls: Pieces) -> Pieces:
        """What a grammar must produce where calls may be made: any text, or text and then `calls`,
        which begin with the format's marker."""
        marker = calls[0]
        assert isinstance(marker, Literal)
        return (Either(((FreeText(marker.text), *calls), (FreeText(""),))),)


def json_pieces(before: str, name: str, key: str, schema: Any, after: str) -> Pieces:
    """Pieces of a call that is one object with a name and arguments."""
    head = f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return (Literal(head), Json(schema), Literal("}" + after))
