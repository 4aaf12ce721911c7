"""gpt-oss: calls are messages to functions. Reads reasoning and reply too."""

from __future__ import annotations

from jaxllm.grammar.pieces import Either, FreeText, Json, Literal, Pieces, Repeated
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.harmony import CHANNEL, ENDS, MESSAGE, START, Harmony
from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.schema import Schema

CALL = f"{CHANNEL}commentary to=functions."


class Parser(Harmony, ToolParser):
    aliases = ("openai", "harmony")
    signs = (CHANNEL, MESSAGE)
    special = (CHANNEL, MESSAGE)
    open = (CALL,)
    calls = True

    @classmethod
    def ends_thought(cls) -> tuple[str, ...]:
        return ()  # thought begins with the same markers

    def has_function(self, name: str) -> bool:
        return name in self.tools

    def function_call(self, name: str) -> Reading[None]:
        yield from self.json_arguments(name, closers=ENDS)
        yield from self.spaces()
        yield from self.take(*ENDS)

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        head = f"{CALL}{name} <|constrain|>json{MESSAGE}"
        return (Literal(head), Json(schema), Literal("<|call|>"))

    @classmethod
    def free_pieces(cls, calls: Pieces) -> Pieces:
        """Text is a message, too: thoughts and what is said before a call, then a reply or the
        calls."""
        thought = Literal(f"{CHANNEL}analysis{MESSAGE}")
        preface = Literal(f"{CHANNEL}commentary{MESSAGE}")
        end = f"<|end|>{START}assistant"
        before = (Either(((thought,), (preface,))), FreeText("<|end|>"), Literal(end))
        reply = (Literal(f"{CHANNEL}final{MESSAGE}"), FreeText(""))
        return (Repeated(before), Either((calls, reply)))
