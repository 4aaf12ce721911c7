"""Magistral: [THINK]…[/THINK]."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("magistral",)
    signs = ("[THINK]",)
    other_signs = (("[/THINK]",),)
    special = ("[THINK]", "[/THINK]")
    starts = ("[THINK]",)
    ends = ("[/THINK]",)
