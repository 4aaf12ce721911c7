"""gpt-oss: calls are messages to functions. Reads reasoning and reply too."""

from __future__ import annotations

from jaxllm.grammar.pieces import Json, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.harmony import CHANNEL, ENDS, MESSAGE, Harmony
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.schema import Schema


class Parser(Harmony, ToolParser):
    aliases = ("openai", "harmony")
    signs = (CHANNEL, MESSAGE)
    special = (CHANNEL, MESSAGE)
    calls = True

    @classmethod
    def ends_thought(cls) -> tuple[str, ...]:
        return ()  # thought begins with the same markers

    def function_call(self, name: str) -> Reading[None]:
        yield from self.json_arguments(name, closers=ENDS)
        yield from self.spaces()
        yield from self.take(*ENDS)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}"
        return (Literal(head), Json(schema), Literal("<|call|>"))
