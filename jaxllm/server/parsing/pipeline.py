"""Reasoning, then tool calls: generated text becomes the parts of one choice."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.harmony import Harmony
from jaxllm.server.parsing.parts import Part, Text, ToolStart
from jaxllm.server.parsing.schema import Tools
from jaxllm.server.parsing.thinking import ReasoningParser

_ALPHANUMERICS = string.ascii_letters + string.digits


class Pipeline:
    """Follows one choice.

    Attributes:
        thinking: the text so far ends within reasoning.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, calls_before: int = 0
    ):
        """`calls_before`: how many tool calls the conversation has."""
        self._reasoning = reasoning
        self._tools = tools
        self._new_id = new_ids(tools.ids if tools is not None else "call", calls_before)
        self._thinks = reasoning if reasoning is not None else tools

    @property
    def thinking(self) -> bool:
        return bool(getattr(self._thinks, "thinking", False))

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after this text."""
        if self._reasoning is None:
            return self._calls([Text(text)] if text else [])
        return self._calls(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        """The last parts, when no text follows."""
        last = [] if self._reasoning is None else self._calls(self._reasoning.finish())
        return last if self._tools is None else last + self._with_ids(self._tools.finish())

    def _calls(self, parts: list[Part]) -> list[Part]:
        """The tool parser's parts in place of texts."""
        tools = self._tools
        if tools is None:
            return parts
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                out += self._with_ids(tools.feed(part.text))
            else:
                out.append(part)
        return out

    def _with_ids(self, parts: list[Part]) -> list[Part]:
        for at, part in enumerate(parts):
            if isinstance(part, ToolStart) and part.id is None:
                parts[at] = ToolStart(part.index, part.name, self._new_id(part))
        return parts


def pipeline(
    reasoning: type[ReasoningParser] | None,
    tools: type[ToolParser] | None,
    prompt: str = "",
    schemas: Tools | None = None,
    calls_before: int = 0,
) -> Pipeline:
    """The pipeline of one choice.

    `prompt`: the rendered prompt; its end tells whether the answer begins within reasoning.
    `schemas`: of the arguments of the request's tools, by name; None if it may call none.
    """
    calls = tools(schemas) if tools is not None and schemas is not None else None
    if reasoning is None or isinstance(calls, Harmony):  # which reads reasoning itself
        return Pipeline(None, calls, calls_before)
    also_ends = calls.open if calls is not None and calls.special else ()
    return Pipeline(reasoning(prompt, also_ends), calls, calls_before)


def new_ids(style: str, calls_before: int) -> Callable[[ToolStart], str]:
    """What makes ids for calls to which the model gave none."""
    if style == "mistral":
        return lambda start: "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))
    if style == "kimi":
        return lambda start: f"functions.{start.name}:{calls_before + start.index}"
    return lambda start: f"call_{secrets.token_hex(12)}"
