"""Granite 3.2: two sentences stand for the markers."""

from __future__ import annotations

from jaxllm.server.parsing.thinking import ReasoningParser


class Parser(ReasoningParser):
    aliases = ("granite3",)
    signs = ("Here is my thought process:",)
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
