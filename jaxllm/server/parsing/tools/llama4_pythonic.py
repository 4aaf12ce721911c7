"""Llama 4: Python calls, between <|python_start|> and <|python_end|> or bare."""

from __future__ import annotations

from jaxllm.server.parsing.machine import Reading
from jaxllm.server.parsing.tools.pythonic import Parser as Pythonic

START, END = "<|python_start|>", "<|python_end|>"


class Parser(Pythonic):
    aliases = ("llama4",)
    signs = (START,)
    special = (START,)
    open = (START, "[")
    close = (END,)

    def call(self, marker: str) -> Reading[None]:
        if marker == START:
            yield from self.expect("[")
        yield from super().call(marker)
