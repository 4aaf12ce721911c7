"""FunctionGemma: <start_function_call>call:name{key:<escape>value<escape>,…}<end_function_call>"""

from __future__ import annotations

import re
from typing import Any

from jaxllm.grammar.pieces import Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser, empty_value
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.markers import ESCAPED, Markers
from jaxllm.server.parsing.pieces import listed, raw_value
from jaxllm.server.parsing.schema import Schema, is_string, properties, typed
from jaxllm.server.parsing.values import as_json, encode_string

START, END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"
MAX_DEPTH = 32

_NAME = re.compile(r"[^{}\[\],<>\"]*").match
_KEY = re.compile(r"[^:{}\[\],<>\"]*").match
_SCALAR = re.compile(r"[-+.\w]*").match
_ESCAPE = Markers((ESCAPE,), also_hot=ESCAPED)


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
        yield from self.pairs(properties(root), root, 0)
        self.end()

    def pairs(self, parts: Any, root: Any, depth: int) -> Reading[None]:
        """Keys and values from behind the brace. Raises Malformed."""
        before = "{"
        while (yield from self.spaces()) != "}":
            if (yield from self.take('"')):
                key = yield from self.short_string()
            else:
                key = (yield from self.matching(_KEY)).strip()
            yield from self.expect(":")
            head = f"{before}{encode_string(key)}: "
            schema = parts.get(key)
            if not is_string(schema, root) and (yield from self.empty()):
                value = empty_value(schema, root)
                self.arguments("" if value is None else head + value)
                before = before if value is None else ", "
            else:
                self.arguments(head)
                before = ", "
                yield from self.one_value(schema, root, depth)
            yield from self.take(",")
        yield from self.take("}")
        self.arguments("{}" if before == "{" else "}")

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
            yield from self.pairs(properties(schema), root, depth + 1)
        else:
            before = "["
            while (yield from self.spaces()) != "]":
                self.arguments(before)
                before = ", "
                yield from self.one_value(None, root, depth + 1)
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
        arguments: dict[str, Pieces] = {}
        for key, part in properties(schema).items():
            value = raw_value(part, schema, ESCAPE)
            mark = Literal(f"{key}:{ESCAPE}")
            arguments[key] = (mark, *value, Literal(ESCAPE))
        inside = listed(arguments, schema, ",")
        return (Literal(f"{START}call:{name}{{"), *inside, Literal("}" + END))
