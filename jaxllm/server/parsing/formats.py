"""The formats that a model writes its reasoning and its tool calls in."""

from __future__ import annotations

import msgspec

from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.registry import find_reasoning, find_tools, is_auto, shown_signs
from jaxllm.server.parsing.thinking import ReasoningParser
from jaxllm.server.parsing.wrappers import find_wrappers


class Formats(msgspec.Struct, frozen=True):
    """Of one served model; None where it has none.

    Attributes:
        wrappers: names of tags around replies, which are taken off.
        reasoning_signs: texts of the template by which the format was chosen; empty if it was
            named, or none was found.
        tools_signs: so for tool calls.
    """

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None
    wrappers: tuple[str, ...] = ()
    reasoning_signs: tuple[str, ...] = ()
    tools_signs: tuple[str, ...] = ()

    def special(self, calls: bool) -> bool:
        """Whether markers are special tokens: the text must be made with skip_special_tokens off.

        `calls`: the answer may have tool calls.
        """
        used = (self.reasoning, self.tools if calls else None)
        return any(parser is not None and parser.special for parser in used)


def find_formats(reasoning: str, tools: str, template: str | None) -> Formats:
    """Formats by names, aliases, "auto" or "none". Raises ValueError for an unknown name."""
    thoughts = find_reasoning(reasoning, template)
    calls = find_tools(tools, template)
    return Formats(
        reasoning=thoughts,
        tools=calls,
        wrappers=() if thoughts is None else find_wrappers(template, thoughts.result_tags),
        reasoning_signs=shown_signs(thoughts, template) if is_auto(reasoning) else (),
        tools_signs=shown_signs(calls, template) if is_auto(tools) else (),
    )


def format_name(parser: type[ReasoningParser] | type[ToolParser] | None) -> str:
    """The name of a format."""
    if parser is None:
        return "none"
    return parser.__module__.rpartition(".")[2]


def chosen_format(
    parser: type[ReasoningParser] | type[ToolParser] | None, name: str, signs: tuple[str, ...]
) -> str:
    """Says which format was chosen by a name or "auto", and by which signs."""
    chosen = format_name(parser)
    if not is_auto(name):
        return f"{chosen} (named)"
    if parser is None:
        return f"{chosen} (the chat template has no sign of any)"
    return f"{chosen} (the chat template has {' and '.join(signs)})"
