"""GLM 4 of 2024 and 0414: the first line is a tool's name, then its arguments follow as JSON."""

from __future__ import annotations

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Malformed, Reading
from jaxllm.server.parsing.schema import Schema


class Parser(ToolParser):
    signs = ("<|observation|>",)
    several = False

    def read(self) -> Reading[None]:
        if self.tools and (yield from self.attempt(self.call(""), "")):
            yield from self.after()
        yield from super().read()

    def call(self, marker: str) -> Reading[None]:
        yield from self.take("\n")
        line = yield from self.take(*(name + "\n" for name in self.tools))
        if line is None or (yield from self.spaces()) != "{":
            raise Malformed
        self.start(line[:-1])
        yield from self.json_arguments()

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return (Literal(name + "\n"), Json(schema))
