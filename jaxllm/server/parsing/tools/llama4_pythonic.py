"""Llama 4: Python calls, between <|python_start|> and <|python_end|> or bare."""

from __future__ import annotations

from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.tools.pythonic import Parser as Pythonic

START = "<|python_start|>"
END = "<|python_end|>"


class Parser(Pythonic):
    aliases = ("llama4",)
    signs = (START,)
    special = (START,)
    open = (START, "[")
    close = (END,)

    marked = False  # the calls have a marker, and may be of any tool

    def call(self, marker: str) -> Reading[None]:
        self.marked = marker == START
        if self.marked:
            yield from self.expect("[")
        yield from super().call(marker)

    def callee(self) -> Reading[str]:
        if not self.marked:
            return (yield from super().callee())
        yield from self.spaces()
        name = yield from self.name()
        yield from self.expect("(")
        return name
