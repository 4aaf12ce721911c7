"""MiniMax M2: the prompt begins the reasoning, so all is reasoning until </think>."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    signs = ("<think>", "<minimax:tool_call>")
    always = True
    result_tags = ("response",)
