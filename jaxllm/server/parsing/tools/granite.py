"""Granite 3: <|tool_call|>[{"name": …, "arguments": {…}}, …]"""

from __future__ import annotations

from jaxllm.grammar.pieces import Pieces
from jaxllm.server.parsing.calls import ToolParser, json_pieces
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema


class Parser(ToolParser):
    aliases = ("granite3",)
    signs = ("<|tool_call|>",)
    special = ("<|tool_call|>",)
    open = ("<|tool_call|>", "<tool_call>")
    close = ("<|end_of_text|>",)
    section = Section("<|tool_call|>[", ", ", "]")

    def call(self, marker: str) -> Reading[None]:
        return self.json_calls()

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return json_pieces("", name, "arguments", schema, "")
