"""Reasoning, then tool calls: generated text becomes the parts of one choice."""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable

from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.harmony import Harmony
from jaxllm.server.parsing.machine import Clear, Machine
from jaxllm.server.parsing.markers import NONE
from jaxllm.server.parsing.parts import Part, Text
from jaxllm.server.parsing.schema import Tools
from jaxllm.server.parsing.thinking import ReasoningParser

ALL = Clear(Text, NONE.hot)
_ALPHANUMERICS = string.ascii_letters + string.digits


class Pipeline:
    """Follows one choice."""

    def __init__(
        self,
        reasoning: Machine | None,
        reply: Machine | None,
        keep: Callable[[Part], bool] | None = None,
    ):
        """`reply` reads what is not reasoning; without it, that is text. With `keep`, parts of
        which it is false are dropped."""
        self._keep = keep
        self._reply = reply
        self._reader = reply if reasoning is None else reasoning

    @property
    def thinking(self) -> bool:
        """The text so far ends within reasoning."""
        return self._reader is not None and self._reader.thinking

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return self._reply is not None and self._reply.called

    @property
    def clear(self) -> Clear | None:
        """Text that need not be fed now, which is most; None where all must be."""
        clear = ALL if self._reader is None else self._reader.clear
        dropped = clear is not None and self._keep is not None and not self._keep(clear.make(""))
        return None if dropped else clear

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after this text."""
        reader = self._reader
        if reader is None:
            parts: list[Part] = [Text(text)] if text else []
        else:
            parts = reader.feed(text)
            if reader.over:
                parts = self._reply_in(parts)
                self._reader = self._reply
        return parts if self._keep is None else list(filter(self._keep, parts))

    def finish(self) -> list[Part]:
        """The last parts, when no text follows."""
        parts = [] if self._reader is None else self._reader.finish()
        if self._reader is not self._reply:
            parts = self._reply_in(parts)
            parts += [] if self._reply is None else self._reply.finish()
        return parts if self._keep is None else list(filter(self._keep, parts))

    def _reply_in(self, parts: list[Part]) -> list[Part]:
        """The reply's parts in place of texts."""
        if self._reply is None:
            return parts
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                out += self._reply.feed(part.text)
            else:
                out.append(part)
        return out


def pipeline(
    reasoning: type[ReasoningParser] | None,
    tools: type[ToolParser] | None,
    prompt: str = "",
    schemas: Tools | None = None,
    calls_before: int = 0,
    keep: Callable[[Part], bool] | None = None,
) -> Pipeline:
    """The pipeline of one choice.

    `prompt`: the rendered prompt; its end tells whether the answer begins within reasoning.
    `schemas`: of the arguments of the request's tools, by name; None if it may call none.
    `calls_before`: how many tool calls the conversation has.
    `keep`: tells parts that are wanted from those that are dropped; None keeps all.
    """
    calls = None
    if tools is not None and schemas is not None:
        calls = tools(schemas, new_ids(tools.ids, calls_before))
    if reasoning is None or isinstance(calls, Harmony):  # which reads reasoning itself
        return Pipeline(None, calls, keep)
    rehearsal = None
    if tools is not None and schemas is not None:
        rehearsal = functools.partial(tools, schemas, in_thought=True)
    return Pipeline(reasoning(prompt, rehearsal), calls, keep)


def new_ids(style: str, calls_before: int) -> Callable[[str, int], str]:
    """What makes ids, of a name and an index, for calls to which the model gave none."""
    if style == "mistral":
        return lambda name, index: "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))
    if style == "kimi":
        return lambda name, index: f"functions.{name}:{calls_before + index}"
    return lambda name, index: f"call_{secrets.token_hex(12)}"
