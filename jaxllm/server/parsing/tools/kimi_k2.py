"""Kimi K2: the id carries the name and counts the conversation's calls, functions.name:0."""

from __future__ import annotations

import re

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_ID = re.compile(r"(?:functions\.)?(.+):\d+").fullmatch


class Parser(ToolParser):
    signs = (CALLS,)
    special = (CALLS, CALL)
    ids = "kimi"
    numbered = True
    open = (CALLS, CALL)
    close = (CALL_END, CALLS_END)
    section = Section(CALLS, "", CALLS_END)

    def call(self, marker: str) -> Reading[None]:
        if marker == CALLS:
            yield from self.expect(CALL)
        yield from self.spaces()
        id = yield from self.name()
        named = _ID(id)
        yield from self.expect(ARGUMENTS)
        if named is None or (yield from self.spaces()) != "{":
            raise Malformed
        self.start(named[1], id)
        yield from self.json_arguments()

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{CALL}functions.{name}:{number}{ARGUMENTS}"
        return (Literal(head), Json(schema), Literal(CALL_END))
