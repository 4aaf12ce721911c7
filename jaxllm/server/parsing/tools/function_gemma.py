"""FunctionGemma: <start_function_call>call:name{key:<escape>value<escape>,…}<end_function_call>"""

from __future__ import annotations

import json
import re
from typing import Any

from jaxllm.grammar.pieces import Arguments, Layout, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser, blank_value
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.markers import ESCAPED, Markers
from jaxllm.server.parsing.pieces import NEW_KEY
from jaxllm.server.parsing.schema import Schema, is_string, items_of, property_of, typed
from jaxllm.server.parsing.values import as_json, encode_string

START = "<start_function_call>"
END = "<end_function_call>"
ESCAPE = "<escape>"
MAX_DEPTH = 32
MAX_KEY = 1024  # characters of a key that is written as JSON

_NAME = re.compile(r"[^{}\[\],<>\"]*").match
_KEY = re.compile(r"[^:{}\[\],<>\"]*").match
_SCALAR = re.compile(r"[-+.\w]*").match
_ESCAPE = Markers((ESCAPE,), also_hot=ESCAPED)
LAYOUT = Layout(
    text=(":" + ESCAPE, ESCAPE),
    json=(":", ""),
    comma=",",
    key=r"[^:{}\[\],<>\"\s]([^:{}\[\],<>\"]{0,253}[^:{}\[\],<>\"\s])?",
    new_key=NEW_KEY,
    ends_text=(ESCAPE,),
)


class Parser(ToolParser):
    aliases = ("functiongemma",)
    signs = (START,)
    special = (START,)
    open = (START,)
    close = (END,)

    def call(self, marker: str) -> Reading[None]:
        yield from self.expect("call:")
        name = yield from self.matching(_NAME)
        yield from self.expect("{")
        if not name.strip():
            raise Malformed
        self.start(name.strip())
        root = self.tools.get(name.strip())
        yield from self.pairs(root, root, 0)
        self.end()

    def pairs(self, schema: Any, root: Any, depth: int) -> Reading[None]:
        """Keys and values from behind the brace. Raises Malformed."""
        before = "{"
        while (yield from self.spaces()) != "}":
            key = yield from self.key()
            yield from self.expect(":")
            head = f"{before}{key}: "
            part = property_of(schema, json.loads(key), root)
            if is_string(part, root) or not (yield from self.empty()):
                self.arguments(head)
                before = ", "
                yield from self.one_value(part, root, depth)
            elif (value := blank_value("", part, root)) is not None:
                self.arguments(head + value)
                before = ", "
            yield from self.take(",")
        yield from self.take("}")
        self.arguments("{}" if before == "{" else "}")

    def key(self) -> Reading[str]:
        """A key, quoted or as it stands, as JSON. Raises Malformed."""
        if (yield from self.character()) != '"':
            return encode_string((yield from self.matching(_KEY)).strip())
        written: list[str] = []
        yield from self.value(written.append, MAX_KEY)
        return "".join(written)

    def empty(self) -> Reading[bool]:
        """Takes a string without text, and the white space behind it. → whether there was one."""
        yield from self.spaces()
        empty = (yield from self.take(ESCAPE + ESCAPE)) is not None
        yield from self.spaces()
        return empty

    def one_value(self, schema: Any, root: Any, depth: int) -> Reading[None]:
        """A value of any type, and the white space behind it. Raises Malformed."""
        if (yield from self.spaces()) == '"':
            yield from self.value(self.arguments)
        elif (opening := (yield from self.take(ESCAPE, "{", "["))) is None:
            scalar = as_json((yield from self.matching(_SCALAR)), python=True)
            if scalar is None:
                raise Malformed
            self.arguments(scalar.strip())
        elif opening == ESCAPE:
            yield from self.escaped(schema, root)
        elif depth == MAX_DEPTH:
            raise Malformed
        elif opening == "{":
            yield from self.pairs(schema, root, depth + 1)
        else:
            before = "["
            items = items_of(schema, root)
            while (yield from self.spaces()) != "]":
                self.arguments(before)
                before = ", "
                yield from self.one_value(items, root, depth + 1)
                yield from self.take(",")
            yield from self.take("]")
            self.arguments("[]" if before == "[" else "]")
        yield from self.spaces()

    def escaped(self, schema: Any, root: Any) -> Reading[None]:
        """A string from behind its mark; it streams if a string is wanted. Raises Malformed."""
        if is_string(schema, root):
            self.arguments('"')
            yield from self.string_text(_ESCAPE)
            self.arguments('"')
            return
        pieces: list[str] = []
        if (yield from self.until(_ESCAPE, pieces.append)) is None:
            raise Malformed
        self.arguments(typed("".join(pieces), schema, root))

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{START}call:{name}{{"
        return (Literal(head), Arguments(schema, LAYOUT), Literal("}" + END))
