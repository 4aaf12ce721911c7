"""Phi 4 mini: functools[{"name": …, "arguments": {…}}, …], or <|tool_call|>[…]<|/tool_call|>"""

from __future__ import annotations

from jaxllm.grammar.pieces import Pieces
from jaxllm.server.parsing.calls import ToolParser, json_pieces
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema


class Parser(ToolParser):
    aliases = ("phi4_mini_json",)
    signs = ("<|tool|>", "<|/tool|>")
    special = ("<|tool_call|>",)
    open = ("functools", "<|tool_call|>")
    close = ("<|/tool_call|>",)
    section = Section("functools[", ", ", "]")

    def call(self, marker: str) -> Reading[None]:
        return self.json_calls()

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return json_pieces("", name, "arguments", schema, "")
