"""The formats that a model writes its reasoning and its tool calls in."""

from __future__ import annotations

import msgspec

from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.registry import find_reasoning, find_tools
from jaxllm.server.parsing.thinking import ReasoningParser


class Formats(msgspec.Struct, frozen=True):
    """Of one served model; None where it has none."""

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None

    def special(self, calls: bool) -> bool:
        """Whether markers are special tokens: the text must be made with skip_special_tokens off.

        `calls`: the answer may have tool calls.
        """
        used = (self.reasoning, self.tools if calls else None)
        return any(parser is not None and parser.special for parser in used)


def find_formats(reasoning: str, tools: str, template: str | None) -> Formats:
    """Formats by names, aliases, "auto" or "none". Raises ValueError for an unknown name."""
    return Formats(find_reasoning(reasoning, template), find_tools(tools, template))


def format_name(parser: type[ReasoningParser] | type[ToolParser] | None) -> str:
    """The name of a format."""
    return "none" if parser is None else parser.__module__.rpartition(".")[2]
