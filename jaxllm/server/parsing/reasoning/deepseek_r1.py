"""DeepSeek R1: all is reasoning until </think>, also where <think> was left out."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    signs = ("</think>", "<｜Assistant｜><think>")
    always = True
