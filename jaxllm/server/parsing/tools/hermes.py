"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>"""

from __future__ import annotations

from jaxllm.grammar.pieces import Pieces
from jaxllm.server.parsing.calls import ToolParser, json_pieces
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema


class Parser(ToolParser):
    aliases = ("qwen", "qwen25", "qwen2_5", "qwen3")
    signs = ("<tool_call>",)
    open = ("<tool_call>",)
    close = ("</tool_call>",)
    section = Section(between="\n")

    def call(self, marker: str) -> Reading[None]:
        return self.json_calls()

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return json_pieces("<tool_call>\n", name, "arguments", schema, "\n</tool_call>")
