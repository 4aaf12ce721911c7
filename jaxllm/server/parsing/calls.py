"""What formats of tool calls share."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from jaxllm.grammar.pieces import Either, FreeText, Json, Literal, Pieces
from jaxllm.server.parsing.machine import (
    MAX_UNDECIDED,
    Clear,
    Machine,
    Malformed,
    Reading,
    Sink,
    ignore,
)
from jaxllm.server.parsing.markers import NEWLINES, Markers
from jaxllm.server.parsing.parts import Part, Reasoning, Text
from jaxllm.server.parsing.pieces import Section
from jaxllm.server.parsing.schema import Schema, Tools, typed, types
from jaxllm.server.parsing.values import EncodedObject, encode_string

_PLAIN = re.compile(r"[^\"\\\x00-\x1f]*").match


class ToolParser(Machine):
    """A format of tool calls. Subclasses say `open` and write `call`.

    Attributes:
        aliases: other names of the format.
        signs: texts that a chat template of this format has, all of them.
        other_signs: other sets of such texts.
        special: markers that are special tokens; if there are any, text must be made with
            skip_special_tokens off.
        ids: style of ids for calls: "call", "mistral" or "kimi".
        open: markers with which calls begin.
        lead: what may stand before such a marker and belong to it.
        close: markers that may follow a call and belong to it.
        section: what surrounds all calls of an output, for grammars.
        several: an output may have several calls.
        numbered: the text of a call has its number, which a grammar cannot count.
    """

    aliases: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    other_signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    special: ClassVar[tuple[str, ...]] = ()
    ids: ClassVar[str] = "call"
    open: ClassVar[tuple[str, ...]] = ()
    lead: ClassVar[tuple[str, ...]] = NEWLINES
    close: ClassVar[tuple[str, ...]] = ()
    section: ClassVar[Section] = Section()
    several: ClassVar[bool] = True
    numbered: ClassVar[bool] = False
    markers: ClassVar[Markers]

    def __init_subclass__(cls) -> None:
        cls.markers = Markers(cls.open, lead=cls.lead)

    def __init__(
        self,
        tools: Tools,
        new_id: Callable[[str, int], str] | None = None,
        in_thought: bool = False,
    ):
        """
        `tools`: schemas of the arguments, by name.
        `new_id`: makes ids of name and index, for calls to which the model gave none.
        `in_thought`: the text is that of a thought; see `rehearse`.
        """
        super().__init__()
        self.tools = tools
        self.new_id = new_id
        self._in_thought = in_thought
        self._held: list[str] = []  # texts of a thought's last calls and white space behind them
        if in_thought:
            self._reading = self.rehearse()

    @property
    def holding(self) -> bool:
        """Whether text is held back that may be calls."""
        return self.recording or bool(self._held)

    @property
    def held(self) -> str:
        """The text of the calls with which a thought has ended; "" if it has not."""
        return "".join(self._held)

    def read(self) -> Reading[None]:
        """Text and calls in turn."""
        passing = Clear(Text, self.markers.hot)
        marker = yield from self.first(self.emit_text, passing)
        while marker is not None:
            if (yield from self.attempt(self.call(marker.lstrip("\n")), marker)):
                yield from self.after()
            marker = yield from self.until(self.markers, self.emit_text, passing)

    def rehearse(self) -> Reading[None]:
        """Reads a thought: text of it is told as reasoning. Complete calls of tools that are there
        are held back as long as only calls and white space follow them: models rehearse calls, and
        only what comes next tells whether one was meant. Calls with which the text ends stay in
        `held`."""
        passing = Clear(Reasoning, self.markers.hot)
        marker = yield from self.first(self._think, passing)
        while marker is not None:
            self.record(marker)
            whole = yield from self.attempt(self.call(marker.lstrip("\n")), marker)
            if whole:
                yield from self.after()
            if whole:
                self._held.append(self.recorded())
            else:
                self._think(self.recorded())
            marker = yield from self.until(self.markers, self._think, passing)

    def first(self, sink: Sink, clear: Clear) -> Reading[str | None]:
        """As `until` with the markers, from the beginning of the text."""
        return self.until(self.markers, sink, clear)

    def _think(self, text: str) -> None:
        """Tells text of a thought, and that calls before it were a part of the thought."""
        if self._held and not text.strip():
            self._held.append(text)
            return
        text = self.held + text
        self._held.clear()
        self.emit_reasoning(text)

    def _resume(self) -> list[Part]:
        parts = super()._resume()
        if self._in_thought and self.holding:
            self.clear = None
        return parts

    def start(self, name: str, id: str | None = None) -> None:
        """A call is certain. Raises Malformed in a thought, for a tool that is not there."""
        if self._in_thought and name not in self.tools:
            raise Malformed
        super().start(name, id)

    def call(self, marker: str) -> Reading[None]:
        """One call or several, from behind the marker. Raises Malformed."""
        raise NotImplementedError

    def after(self) -> Reading[None]:
        """Takes what may stand behind a call: white space, one brace too many, closing markers."""
        while (yield from self.spaces()) == "}":
            yield from self.take("}")
        while self.close and (yield from self.take(*self.close)) is not None:
            yield from self.spaces()

    def json_arguments(
        self, name: str, id: str | None = None, closers: tuple[str, ...] = ()
    ) -> Reading[None]:
        """The arguments of a call, which stand next as JSON, and the call. Raises Malformed.

        They are an object, one that is encoded as a string, or none: null, "", or nothing before
        one of `closers`.
        """
        match (yield from self.spaces()):
            case "{":
                self.start(name, id)
                yield from self.value(self.arguments)
            case '"':
                yield from self.follow(EncodedObject(), functools.partial(self._begun, name, id))
            case _:
                nothing = yield from self.take("null", *closers)
                if nothing is None:
                    raise Malformed
                if nothing != "null":
                    self.give_back(nothing)
                self._begun(name, id, "{}")
        self.end()

    def _begun(self, name: str, id: str | None, text: str) -> None:
        """A fragment of the arguments of a call, which begins with the first."""
        if text and not self._in_call:
            self.start(name, id)
        self.arguments(text)

    def json_call(self, known: bool = False, is_function: bool = False) -> Reading[None]:
        """One object with a name and perhaps arguments, from behind its brace. Raises Malformed.

        The order of keys does not matter. `known`: only of a tool that is there. `is_function`: it
        is itself the value of "function".
        """
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        done = False
        while True:
            yield from self.expect('"')
            key = yield from self.short_string()
            yield from self.expect(":")
            inside = key == "function" and name is None and not is_function
            if inside and (yield from self.spaces()) == "{":
                yield from self.take("{")
                yield from self.json_call(known, is_function=True)
                name = key
                done = True
            elif key in ("name", "function") and name is None:
                yield from self.expect('"')
                name = yield from self.short_string()
                if not name or (known and name not in self.tools):
                    raise Malformed
                if early is not None:
                    self._begun(name, None, early)
                    self.end()
                    done = True
            elif key in ("arguments", "parameters") and not done and early is None:
                if name is None:
                    early = yield from self.early_arguments()
                else:
                    yield from self.json_arguments(name)
                    done = True
            elif key == "type":
                yield from self.expect('"function"')
            elif key == "id":  # nobody knows it yet; the call gets one of ours
                yield from self.value(ignore, MAX_UNDECIDED)
            else:
                raise Malformed
            if (yield from self.expect(",", "}")) == "}":
                break
        if name is None:
            raise Malformed
        if not done:
            self._begun(name, None, "{}")
            self.end()

    def early_arguments(self) -> Reading[str]:
        """Arguments that stand before a name, as an object. Raises Malformed."""
        pieces: list[str] = []
        char = yield from self.spaces()
        if char == '"':
            yield from self.follow(EncodedObject(), pieces.append, MAX_UNDECIDED)
        elif char == "{":
            yield from self.value(pieces.append, MAX_UNDECIDED)
        elif (yield from self.take("null")) is None:
            raise Malformed
        return "".join(pieces) or "{}"

    def json_calls(self, known: bool = False, opened: str = "") -> Reading[None]:
        """Objects with a name and arguments: one, several, or a list of them. Raises Malformed.

        `known`: as of `json_call`. `opened`: the bracket or brace, if it was taken.
        """
        bracket = opened or (yield from self.expect("[", "{"))
        if bracket == "[":
            yield from self.expect("{")
        while True:
            yield from self.json_call(known)
            self._undecided = []
            if bracket == "[":
                more = self._next_listed()
            else:
                more = self._next_object()
            if not (yield from more):
                return

    def _next_listed(self) -> Reading[bool]:
        """Takes what stands behind an object of a list, and the next one's brace. → whether there
        is one. Raises Malformed."""
        if (yield from self.expect(",", "]")) == "]":
            return False
        return (yield from self.expect("{", "]")) == "{"

    def _next_object(self) -> Reading[bool]:
        """As `_next_listed`, where there is no list."""
        while (yield from self.spaces()) == "}":  # one too many
            yield from self.take("}")
        comma = yield from self.take(",", ";")
        if comma is not None:
            yield from self.spaces()
        another = (yield from self.take("{")) is not None
        if comma is not None and not another:
            if comma not in self.close:
                raise Malformed
            self._undecided = []
        return another

    def string_text(self, end: Markers) -> Reading[None]:
        """Text up to a marker, as the inside of a JSON string. Raises Malformed."""
        sink = lambda text: self.arguments(encode_string(text)[1:-1])
        if (yield from self.until(end, sink, Clear(self.fragment, end.hot))) is None:
            raise Malformed

    def short_string(self) -> Reading[str]:
        """A JSON string behind its quote. Raises Malformed."""
        text = yield from self.matching(_PLAIN)
        if (yield from self.take('"')) is None:
            raise Malformed
        return text

    @classmethod
    def ends_thought(cls) -> tuple[str, ...]:
        """Markers behind which a thinking budget forces no end: it would break the call."""
        return cls.special

    @classmethod
    def pieces(cls, name: str, schema: Schema, number: int) -> Pieces:
        """What a grammar must produce for one call of a tool.

        `number`: how many calls the conversation had before.
        """
        raise NotImplementedError

    @classmethod
    def free_pieces(cls, calls: Pieces) -> Pieces:
        """What a grammar must produce where calls may be made: any text, or text and then `calls`,
        which begin with the format's marker."""
        marker = calls[0]
        assert isinstance(marker, Literal)
        return (Either(((FreeText(marker.text), *calls), (FreeText(""),))),)


def blank_value(text: str, schema: Any, root: Any) -> str | None:
    """What blank text is in a format that writes values without quotes, as JSON: that text where
    text is allowed, else null where that is; else None, for a value that is left out."""
    allowed = types(schema, root)
    if not allowed or "string" in allowed:
        return typed(text, schema, root)
    if "null" in allowed:
        return "null"
    return None


def json_pieces(before: str, name: str, key: str, schema: Any, after: str) -> Pieces:
    """Pieces of a call that is one object with a name and arguments."""
    head = f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return (Literal(head), Json(schema), Literal("}" + after))
