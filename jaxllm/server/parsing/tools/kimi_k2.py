"""Kimi K2: the id carries the name and counts the conversation's calls, functions.name:0.

The section's markers are read in singular, too. Of ids, the prefix and the number may be missing,
and `-`, `_` or `.` may stand before the number, where that leaves the name of a tool that is there.
"""

from __future__ import annotations

import re

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema

CALLS = "<|tool_calls_section_begin|>"
CALLS_END = "<|tool_calls_section_end|>"
ONE_CALLS = "<|tool_call_section_begin|>"
ONE_CALLS_END = "<|tool_call_section_end|>"
CALL = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"

_NUMBERED = re.compile(r"(.+)([:._-])\d+").fullmatch


class Parser(ToolParser):
    signs = (CALLS,)
    special = (CALLS, ONE_CALLS, CALL)
    ids = "kimi"
    numbered = True
    open = (CALLS, ONE_CALLS, CALL)
    close = (CALL_END, CALLS_END, ONE_CALLS_END)
    section = Section(CALLS, "", CALLS_END)

    def call(self, marker: str) -> Reading[None]:
        if marker != CALL:
            yield from self.expect(CALL)
        yield from self.spaces()
        id = yield from self.name()
        yield from self.spaces()
        yield from self.take(ARGUMENTS)
        name = self.tool_name(id)
        if not name:
            raise Malformed
        if _NUMBERED(id):
            yield from self.json_arguments(name, id, self.close)
        else:  # it would be the id of the tool's next call, too
            yield from self.json_arguments(name, None, self.close)

    def tool_name(self, id: str) -> str:
        """The name that an id carries: that of a tool if one fits, else all before the number."""
        bare = id.removeprefix("functions.")
        numbered = _NUMBERED(bare)
        if numbered is None:
            return bare
        if bare in self.tools or (numbered[2] != ":" and numbered[1] not in self.tools):
            return bare
        return numbered[1]

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{CALL}functions.{name}:{number}{ARGUMENTS}"
        return (Literal(head), Json(schema), Literal(CALL_END))
