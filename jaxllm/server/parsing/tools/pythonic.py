"""Calls as Python writes them: [name(key='value', other=3), other_name()]. Without a marker, a list
is calls only if it names tools."""

from __future__ import annotations

import re
from typing import ClassVar

from jaxllm.grammar.pieces import Arguments, Layout, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema
from jaxllm.server.parsing.values import encode_string

_KEY = re.compile(r"\w*").match
LAYOUT = Layout(json=("=", ""), comma=", ", key=r"\w{1,255}", new_key="[A-Za-z_][A-Za-z0-9_]{0,63}")


class Parser(ToolParser):
    signs = ("[func_name1(params_name1=params_value1",)
    open: ClassVar[tuple[str, ...]] = ("[",)
    section = Section("[", ", ", "]")

    def call(self, marker: str) -> Reading[None]:
        while True:
            yield from self.one_call()
            if (yield from self.expect(",", "]")) == "]":
                return

    def one_call(self) -> Reading[None]:
        """name(key=value, …). Raises Malformed."""
        name = yield from self.callee()
        key = yield from self.key()
        self.start(name)
        before = "{"
        while key:
            self.arguments(f"{before}{encode_string(key)}: ")
            before = ", "
            yield from self.spaces()
            yield from self.value(self.arguments, python=True)
            if (yield from self.expect(",", ")")) == ")":
                break
            key = yield from self.key()
        self.arguments("{}" if before == "{" else "}")
        self.end()

    def callee(self) -> Reading[str]:
        """The name of a tool that is there, and the parenthesis. Raises Malformed."""
        yield from self.spaces()
        name = yield from self.take(*(tool + "(" for tool in self.tools))
        if name is None:
            raise Malformed
        return name[:-1]

    def key(self) -> Reading[str]:
        """The next key and its sign; "" and the closing parenthesis. Raises Malformed."""
        if (yield from self.spaces()) == ")":
            yield from self.take(")")
            return ""
        key = yield from self.matching(_KEY)
        if not key:
            raise Malformed
        yield from self.expect("=")
        return key

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return (Literal(name + "("), Arguments(schema, LAYOUT), Literal(")"))
