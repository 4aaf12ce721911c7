"""Mistral. Up to v7: [TOOL_CALLS][{"name": …, "arguments": {…}}, …]; from v11 on:
[TOOL_CALLS]name{…}, with [CALL_ID]id and [ARGS] before the arguments if the tokenizer has them."""

from __future__ import annotations

import re

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.schema import Schema

_ID = re.compile(r"[A-Za-z0-9]*").match


class Parser(ToolParser):
    signs = ("[TOOL_CALLS]",)
    special = ("[TOOL_CALLS]",)
    ids = "mistral"
    open = ("[TOOL_CALLS]",)

    def call(self, marker: str) -> Reading[None]:
        if (yield from self.spaces()) in ("[", "{"):
            yield from self.json_calls()
            return
        name = yield from self.name()
        id = None
        if (yield from self.take("[CALL_ID]")):
            id = yield from self.matching(_ID)
        yield from self.take("[ARGS]")
        yield from self.json_arguments(name, id, self.open)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        return (Literal(f"[TOOL_CALLS]{name}"), Json(schema))
