"""What formats of reasoning share: it begins the output and stands between two markers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ClassVar, Protocol

from jaxllm.server.parsing.machine import Clear, Machine, Reading
from jaxllm.server.parsing.markers import NEWLINES, NONE, Markers
from jaxllm.server.parsing.parts import Part, Reasoning, Text

_NEWLINES = re.compile(r"\n*").match


@functools.cache
def _markers(words: tuple[str, ...]) -> Markers:
    """Markers that end a thought."""
    return Markers(words, lead=NEWLINES)


@functools.cache
def _either(first: Markers, second: Markers) -> Markers:
    """Markers of two sets, of which only `hot` is used: they may be prefixes of others."""
    return Markers(first.words | second.words)


class Rehearsal(Protocol):
    """Reads a thought for calls; formats of tool calls do.

    Attributes:
        markers: with which calls begin.
        clear: text that need not be fed now, as of a machine.
        holding: text is held back that may be calls.
        held: the calls with which the thought has ended, as text; "" if it has not.
    """

    markers: ClassVar[Markers]

    @property
    def clear(self) -> Clear | None: ...
    @property
    def holding(self) -> bool: ...
    @property
    def held(self) -> str: ...
    def feed(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]: ...


class ReasoningParser(Machine):
    """A format of reasoning. Subclasses say `starts` and `ends`.

    Newlines beside a marker belong to it. What begins with no marker is reply throughout.

    Attributes:
        aliases: other names of the format.
        signs: texts that a chat template of this format has, all of them.
        other_signs: other sets of such texts.
        special: markers that are special tokens; if there are any, text must be made with
            skip_special_tokens off.
        starts: markers that begin reasoning; prompts often end with the first.
        ends: markers that end it. Forcing the first ends thought at a budget.
        always: the output is reasoning unless the prompt has ended it.
        between: what stands between reasoning and the rest, for grammars.
        reply: what begins text that is a reply, for grammars.
        result_tags: names of tags that its templates have around results of tools, so that they say
            nothing of replies.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    other_signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    special: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    always: ClassVar[bool] = False
    between: ClassVar[str] = ""
    reply: ClassVar[str] = ""
    result_tags: ClassVar[tuple[str, ...]] = ()

    def __init__(self, prompt: str = "", rehearsal: Callable[[], Rehearsal] | None = None):
        """
        `prompt`: the rendered prompt, which may have begun or ended the reasoning.
        `rehearsal`: makes what reads a thought for calls; None where none may be made.
        """
        prompt = prompt.rstrip()
        self.thinking = prompt.endswith(self.starts) or (
            self.always and not prompt.endswith(self.ends)
        )
        self._new_rehearsal = rehearsal
        self._rehearsal: Rehearsal | None = None
        super().__init__()

    @property
    def holding(self) -> bool:
        """Whether text of the thought is held back that may be calls."""
        return self._rehearsal is not None and self._rehearsal.holding

    def read(self) -> Reading[None]:
        starts = [before + word for word in self.starts for before in NEWLINES]
        if (yield from self.take(*starts)) is not None:
            self.thinking = True
        if self.thinking:
            yield from self.newlines()
            end = yield from self.thought(_markers(self.ends))
            self.thinking = False
            if end is not None:
                yield from self.newlines()
        self.over = True
        yield from self.until(NONE, self.emit_text, Clear(Text, NONE.hot))

    def thought(self, ends: Markers) -> Reading[str | None]:
        """As of `Machine`. A thought that no marker ends may end with calls: they are text."""
        if self._new_rehearsal is None:
            return (yield from super().thought(ends))
        self._rehearsal = rehearsal = self._new_rehearsal()
        passing = Clear(Reasoning, _either(ends, rehearsal.markers).hot)
        end = yield from self.until(ends, self._rehearse, passing)
        self._parts += rehearsal.finish()
        self._rehearsal = None
        if end is None:
            self.emit_text(rehearsal.held)
        else:
            self.emit_reasoning(rehearsal.held)
        return end

    def _rehearse(self, text: str) -> None:
        """Tells text of a thought that is no call."""
        assert self._rehearsal is not None
        if text:
            self._parts += self._rehearsal.feed(text)

    def _resume(self) -> list[Part]:
        parts = super()._resume()
        if self._rehearsal is not None and self._rehearsal.clear is None:
            self.clear = None
        return parts

    def newlines(self) -> Reading[None]:
        """Takes newlines."""
        while (yield from self.character()) == "\n":
            self.advance(_NEWLINES(self._text, self._position).end())  # type: ignore[union-attr]
