"""DeepSeek V3 and R1: name and arguments in a fence, between tokens with full-width bars."""

from __future__ import annotations

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
NAME = "<｜tool▁sep｜>"


class Parser(ToolParser):
    aliases = ("deepseek_v3", "deepseekv3")
    signs = (CALLS, "```json")
    special = (CALLS, CALL)
    open = (CALLS, CALL)
    close = ("```", CALL_END, CALLS_END)
    section = Section(CALLS, "\n", CALLS_END)

    def call(self, marker: str) -> Reading[None]:
        if marker == CALLS:
            yield from self.expect(CALL)
        yield from self.expect("function" + NAME)
        name = yield from self.name()
        yield from self.expect("```json")
        yield from self.json_arguments(name, closers=self.close)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{CALL}function{NAME}{name}\n```json\n"
        return (Literal(head), Json(schema), Literal("\n```" + CALL_END))
