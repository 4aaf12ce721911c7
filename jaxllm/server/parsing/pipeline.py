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
from jaxllm.server.parsing.parts import Part, Text, ToolStart
from jaxllm.server.parsing.schema import Tools
from jaxllm.server.parsing.thinking import ReasoningParser
from jaxllm.server.parsing.wrappers import Unwrapped

ALL = Clear(Text, NONE.hot)
_ALPHANUMERICS = string.ascii_letters + string.digits


class Pipeline:
    """Follows one choice."""

    def __init__(
        self,
        reasoning: Machine | None,
        reply: Machine | None,
        keep: Callable[[Part], bool] | None = None,
        unwrapped: Unwrapped | None = None,
    ):
        """`reply` reads what is not reasoning; without it, that is text. With `keep`, parts of
        which it is false are dropped. `unwrapped` takes tags off the text of the reply."""
        self._keep = keep
        self._unwrapped = unwrapped
        self._reply = reply
        if reasoning is None:
            self._reader = reply
        else:
            self._reader = reasoning

    @property
    def thinking(self) -> bool:
        """The text so far ends within reasoning."""
        return self._reader is not None and self._reader.thinking

    @property
    def holding(self) -> bool:
        """Text of the thought is held back that may be calls."""
        return self._reader is not None and self._reader.holding

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return self._reply is not None and self._reply.called

    @property
    def clear(self) -> Clear | None:
        """Text that need not be fed now, which is most; None where all must be."""
        clear = ALL if self._reader is None else self._reader.clear
        if self._unwrapped is not None and clear is not None and clear.make is Text:
            clear = _both(clear, self._unwrapped.clear)
        dropped = clear is not None and self._keep is not None and not self._keep(clear.make(""))
        if dropped:
            return None
        return clear

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
        if self._unwrapped is not None:
            parts = self._take_off(self._unwrapped, parts)
        if self._keep is None:
            return parts
        return list(filter(self._keep, parts))

    def finish(self) -> list[Part]:
        """The last parts, when no text follows."""
        if self._reader is not None:
            parts = self._reader.finish()
        else:
            parts = []
        if self._reader is not self._reply:
            parts = self._reply_in(parts)
            if self._reply is not None:
                parts += self._reply.finish()
        if self._unwrapped is not None:
            parts = self._take_off(self._unwrapped, parts)
        if self._unwrapped is not None:
            parts += self._unwrapped.finish()
        if self._keep is None:
            return parts
        return list(filter(self._keep, parts))

    def _take_off(self, unwrapped: Unwrapped, parts: list[Part]) -> list[Part]:
        """Parts without the tags around the reply."""
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                out += unwrapped.feed(part.text)
                continue
            if isinstance(part, ToolStart):
                out += unwrapped.pause()
            out.append(part)
        if unwrapped.over:
            self._unwrapped = None
        return out

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
    wrappers: tuple[str, ...] = (),
) -> Pipeline:
    """The pipeline of one choice.

    `prompt`: the rendered prompt; its end tells whether the answer begins within reasoning.
    `schemas`: of the arguments of the request's tools, by name; None if it may call none.
    `calls_before`: how many tool calls the conversation has.
    `keep`: tells parts that are wanted from those that are dropped; None keeps all.
    `wrappers`: names of tags that are taken off where the reply has one around it.
    """
    unwrapped = None
    if wrappers:
        unwrapped = Unwrapped(wrappers)
    calls = None
    if tools is not None and schemas is not None:
        calls = tools(schemas, new_ids(tools.ids, calls_before))
    if reasoning is None or isinstance(calls, Harmony):  # which reads reasoning itself
        return Pipeline(None, calls, keep, unwrapped)
    rehearsal = None
    if tools is not None and schemas is not None:
        rehearsal = functools.partial(tools, schemas, in_thought=True)
    return Pipeline(reasoning(prompt, rehearsal), calls, keep, unwrapped)


def _both(first: Clear, second: Clear | None) -> Clear | None:
    """Text that is clear by either of two that read it in turn."""
    if second is None:
        return None
    return Clear(first.make, lambda text: first.hot(text) or second.hot(text))


def new_ids(style: str, calls_before: int) -> Callable[[str, int], str]:
    """What makes ids, of a name and an index, for calls to which the model gave none."""
    if style == "mistral":
        return lambda name, index: "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))
    if style == "kimi":
        return lambda name, index: f"functions.{name}:{calls_before + index}"
    return lambda name, index: f"call_{secrets.token_hex(12)}"
