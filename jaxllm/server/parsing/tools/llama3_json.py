"""Llama 3.1 to 3.3: {"name": …, "parameters": {…}}; several are divided by semicolons. Without a
marker, an object is a call only if it names a tool that is there."""

from __future__ import annotations

from jaxllm.grammar.pieces import Pieces
from jaxllm.server.parsing.calls import ToolParser, json_pieces
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema

TAG = "<|python_tag|>"


class Parser(ToolParser):
    aliases = ("llama3", "llama4_json")
    signs = ("dictionary of argument name and its value",)
    special = (TAG,)
    open = (TAG, "{", "[")
    close = (";",)
    section = Section(between="; ")

    def call(self, marker: str) -> Reading[None]:
        if marker == TAG:
            return self.json_calls()
        return self.json_calls(known=True, opened=marker)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return json_pieces("", name, "parameters", schema, "")
