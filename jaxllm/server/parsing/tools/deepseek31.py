"""DeepSeek V3.1: as V3, without type and fence."""

from __future__ import annotations

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema
from jaxllm.server.parsing.tools.deepseek3 import CALL, CALL_END, CALLS, CALLS_END, NAME


class Parser(ToolParser):
    aliases = ("deepseek_v31", "deepseekv31")
    signs = (CALLS,)
    special = (CALLS, CALL)
    open = (CALLS, CALL)
    close = (CALL_END, CALLS_END)
    section = Section(CALLS, "", CALLS_END)

    def call(self, marker: str) -> Reading[None]:
        if marker == CALLS:
            yield from self.expect(CALL)
        name = yield from self.name()
        yield from self.expect(NAME)
        yield from self.json_arguments(name, closers=self.close)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return (Literal(CALL + name + NAME), Json(schema), Literal(CALL_END))
