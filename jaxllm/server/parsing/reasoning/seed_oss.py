"""Seed OSS: <seed:think>…</seed:think>."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("seed",)
    signs = ("<seed:think>",)
    special = True
    starts = ("<seed:think>",)
    ends = ("</seed:think>",)
