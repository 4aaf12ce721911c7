"""Qwen 3, and others that write <think>…</think> or whose template begins it."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("kimi_k2", "deepseek_v3", "hunyuan", "think")
    signs = ("<think>",)
