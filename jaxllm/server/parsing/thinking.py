"""What formats of reasoning share: it begins the output and stands between two markers."""

from __future__ import annotations

import functools
import re
from typing import ClassVar

from jaxllm.server.parsing.machine import Machine, Reading
from jaxllm.server.parsing.markers import NEWLINES, NONE, Markers
from jaxllm.server.parsing.parts import Reasoning, Text

_NEWLINES = re.compile(r"\n*").match


_markers = functools.cache(lambda words: Markers(words, lead=NEWLINES))


class ReasoningParser(Machine):
    """A format of reasoning. Subclasses say `starts` and `ends`.

    Newlines beside a marker belong to it. What begins with no marker is reply throughout.

    Attributes:
        aliases: other names of the format.
        signs: texts that a chat template of this format has, all of them.
        special: markers that are special tokens; if there are any, text must be made with
            skip_special_tokens off.
        starts: markers that begin reasoning; prompts often end with the first.
        ends: markers that end it. Forcing the first ends thought at a budget.
        always: the output is reasoning unless the prompt has ended it.
        between: what stands between reasoning and the rest, for grammars.
        reply: what begins text that is a reply, for grammars.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    special: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    always: ClassVar[bool] = False
    between: ClassVar[str] = ""
    reply: ClassVar[str] = ""

    def __init__(self, prompt: str = "", also_ends: tuple[str, ...] = ()):
        """
        `prompt`: the rendered prompt, which may have begun or ended the reasoning.
        `also_ends`: markers that end reasoning and are no part of it, such as those of tool calls.
        """
        prompt = prompt.rstrip()
        self.thinking = prompt.endswith(self.starts) or (
            self.always and not prompt.endswith(self.ends)
        )
        self._also_ends = frozenset(also_ends)
        self._markers = _markers((*self.ends, *also_ends))
        super().__init__()

    def read(self) -> Reading[None]:
        starts = [before + word for word in self.starts for before in NEWLINES]
        if (yield from self.take(*starts)) is not None:
            self.thinking = True
        if self.thinking:
            yield from self.newlines()
            end = yield from self.until(self._markers, self.emit_reasoning, Reasoning)
            self.thinking = False
            if end is not None and end.lstrip("\n") in self._also_ends:
                self.give_back(end)
            elif end is not None:
                yield from self.newlines()
        self.over = True
        yield from self.until(NONE, self.emit_text, Text)

    def newlines(self) -> Reading[None]:
        """Takes newlines."""
        while (yield from self.character()) == "\n":
            self.advance(_NEWLINES(self._text, self._at).end())  # type: ignore[union-attr]
