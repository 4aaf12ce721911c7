"""Llama 3.1 to 3.3: {"name": …, "parameters": {…}}; several are divided by semicolons. Without a
marker, an object is a call only if it names a tool that is there. Llama 4's template asks for the
same objects, and shows marks of Python beside them."""

from __future__ import annotations

from jaxllm.grammar.pieces import Pieces
from jaxllm.server.parsing.calls import ToolParser, json_pieces
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema

TAG = "<|python_tag|>"
START = "<|python_start|>"
END = "<|python_end|>"


class Parser(ToolParser):
    aliases = ("llama3", "llama4_json")
    signs = ("dictionary of argument name and its value",)
    special = (TAG, START)
    open = (TAG, START, "{", "[")
    close = (";", END)
    section = Section(between="; ")

    def call(self, marker: str) -> Reading[None]:
        if marker == START:
            yield from self.spaces()
            yield from self.take(END)
        if marker in (TAG, START):
            yield from self.json_calls()
        else:
            yield from self.json_calls(known=True, opened=marker)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return json_pieces("", name, "parameters", schema, "")
