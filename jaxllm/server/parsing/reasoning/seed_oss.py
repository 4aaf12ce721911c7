"""Seed OSS: <seed:think>…</seed:think>."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("seed",)
    signs = ("<seed:think>",)
    other_signs = (("</seed:think>",),)
    special = ("<seed:think>", "</seed:think>")
    starts = ("<seed:think>",)
    ends = ("</seed:think>",)
