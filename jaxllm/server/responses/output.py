"""The output of one response: parts of generated text become items, and the events of these.

One item is open at a time; a part of another kind closes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.responses.output_items import (
    Call,
    Compaction,
    CustomCall,
    Event,
    Item,
    Message,
    Summary,
    Thought,
    new_id,
)
from jaxllm.server.responses.tools import Origin


class Output:
    """The items of one response.

    Attributes:
        items: those that have ended.
    """

    def __init__(self, origins: Mapping[str, Origin], summarised: bool, sealed: bool):
        """`origins`: the request's tools by the name that the model sees. `summarised`: reasoning
        is sent as its summary. `sealed`: reasoning also in a form to be sent back."""
        self.items: list[dict[str, Any]] = []
        self._origins = origins
        self._thought = Summary if summarised else Thought
        self._sealed = sealed
        self._open: Item | None = None
        self._logprobs: list[Any] = []  # of tokens whose text may still become a part

    def feed(self, parts: Sequence[Part], logprobs: list[Any] | None = None) -> list[Event]:
        """The events of the parts that some tokens complete. `logprobs` are those of the tokens;
        None if they cannot be text of the reply, which alone shows its own."""
        waiting = self._logprobs
        self._logprobs = []
        events: list[Event] = []
        new = logprobs or []
        for part in parts:
            if isinstance(part, Text):
                events += self._more(Message, part.text, waiting + new)
                new = []
            else:
                events += self._part(part)
            waiting = []
        if not parts and logprobs is not None and not isinstance(self._open, Call):
            self._logprobs = waiting + new
        return events

    def finish(self, complete: bool) -> list[Event]:
        """The last events; `complete` is false when the output was cut short. A complete output
        has a message, were it empty, unless it has something else."""
        events = self._close(complete)
        if complete and not self.items:
            events += self._begin(Message(0)) + self._close(True)
        return events

    def snapshot(self) -> list[dict[str, Any]]:
        """The items so far; the open one without its text."""
        if self._open is None:
            return self.items
        return [*self.items, self._open.shape()]

    def _part(self, part: Part) -> list[Event]:
        """The events of what is no text of the reply."""
        if isinstance(part, Reasoning):
            return self._more(self._thought, part.text, [])
        if isinstance(part, ToolStart):
            origin = self._origins.get(part.name) or Origin("function", part.name, None)
            call_type = Call
            if origin.tool_type == "custom":
                call_type = CustomCall
            closed = self._close(True)
            call_id = part.id or new_id("call")
            return closed + self._begin(call_type(len(self.items), call_id, origin))
        if isinstance(part, ToolArguments) and self._open is not None:
            return self._open.add(part.text, [])
        if isinstance(part, ToolEnd):
            return self._close(part.complete)
        return []

    def _more(self, item_type: type[Item], text: str, logprobs: list[Any]) -> list[Event]:
        """More text of an item of this kind, which is opened if need be."""
        if type(self._open) is item_type:
            return self._open.add(text, logprobs)
        closed = self._close(True)
        index = len(self.items)
        opened = Message(index) if item_type is Message else self._thought(index, self._sealed)
        return closed + self._begin(opened) + opened.add(text, logprobs)

    def _begin(self, item: Item) -> list[Event]:
        self._open = item
        return item.begin()

    def _close(self, complete: bool) -> list[Event]:
        if self._open is None:
            return []
        item = self._open
        self._open = None
        events = item.end(complete)
        self.items.append(item.shape())
        return events


class SummaryOutput(Output):
    """The output of a request for a summary: one compaction item."""

    def __init__(self, origins: Mapping[str, Origin], summarised: bool, sealed: bool):
        super().__init__(origins, summarised, sealed)
        self._summary = Compaction(0)

    def feed(self, parts: Sequence[Part], logprobs: list[Any] | None = None) -> list[Event]:
        """The text of the reply is the summary; it is sent as a whole."""
        for part in parts:
            if isinstance(part, Text):
                self._summary.add(part.text, [])
        return []

    def finish(self, complete: bool) -> list[Event]:
        """The events of the item."""
        return self._begin(self._summary) + self._close(complete)
