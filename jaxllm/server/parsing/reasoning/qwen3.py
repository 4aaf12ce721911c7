"""Qwen 3, and others that write <think>…</think> or whose template begins it."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("kimi_k2", "deepseek_v3", "hunyuan", "think")
    signs = ("<think>",)
    # Templates that only drop the thoughts of a history, such as R1-0528's: whether the model
    # thinks, its answer tells
    other_signs = (("</think>",),)
