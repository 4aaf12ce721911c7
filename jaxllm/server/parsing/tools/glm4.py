"""GLM 4 of 2024 and 0414: a line is a tool's name, then its arguments follow as JSON. Without a
marker, only the name of a tool that is there begins a call."""

from __future__ import annotations

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Clear, Malformed, Reading, Sink
from jaxllm.server.parsing.schema import Schema


class Parser(ToolParser):
    signs = ("<|observation|>",)
    open = ("\n",)
    lead = ("",)
    several = False

    def first(self, sink: Sink, clear: Clear) -> Reading[str | None]:
        return (yield from self.take("\n")) or ""

    def call(self, marker: str) -> Reading[None]:
        line = yield from self.take(*(name + "\n" for name in self.tools))
        if line is None or (yield from self.spaces()) != "{":
            raise Malformed
        yield from self.json_arguments(line[:-1])

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return (Literal(name + "\n"), Json(schema))
