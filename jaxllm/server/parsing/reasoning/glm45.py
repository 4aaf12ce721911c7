"""GLM 4.5 and later: <think>…</think>, which the prompt closes to switch it off."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("glm46", "glm47", "glm4_moe")
    signs = ("<think>", "<arg_key>")
    other_signs = (("</think>", "<arg_key>"),)
    special = ("<think>", "</think>")
