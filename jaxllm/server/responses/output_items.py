"""Items of a response's output as they grow, and the events that tell of them.

Event types and members are those of OpenAI's Responses API, as openai-python's types and stream
accumulator read them.
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from jaxllm.server.responses.sealed import seal
from jaxllm.server.responses.tools import INPUT, Origin

type Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """A random id: nobody can guess one."""
    return f"{prefix}_{secrets.token_hex(24)}"


class Item:
    """An item of the output as it grows; subclasses know its shape.

    Attributes:
        index: its place in the output.
        status: in_progress, completed or incomplete.
    """

    prefix = ""

    def __init__(self, index: int):
        self.id = new_id(self.prefix)
        self.index = index
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def begin(self) -> list[Event]:
        """The events that open the item."""
        return [self._event("response.output_item.added", item=self.shape())]

    def add(self, text: str, logprobs: list[Any]) -> list[Event]:
        """The events of more text."""
        self._texts.append(text)
        return self._deltas(text, logprobs)

    def end(self, complete: bool) -> list[Event]:
        """The events that close the item."""
        events = self._last()
        if complete:
            self.status = "completed"
        else:
            self.status = "incomplete"
        return [*events, self._event("response.output_item.done", item=self.shape())]

    def shape(self) -> dict[str, Any]:
        """The item's object."""
        raise NotImplementedError

    def _deltas(self, text: str, logprobs: list[Any]) -> list[Event]:
        return []

    def _last(self) -> list[Event]:
        """The events that give the whole text."""
        return []

    def _event(self, type: str, **members: Any) -> Event:
        return {"type": type, "output_index": self.index, **members}

    def _inner(self, type: str, **members: Any) -> Event:
        """An event about a part of the item."""
        return self._event(type, item_id=self.id, **members)


class Message(Item):
    """Text of the reply, with the log-probabilities of its tokens if they were requested."""

    prefix = "msg"

    def __init__(self, index: int):
        super().__init__(index)
        self._logprobs: list[Any] = []

    def begin(self) -> list[Event]:
        """The item, empty, and its only part."""
        return [*super().begin(), self._part("response.content_part.added")]

    def shape(self) -> dict[str, Any]:
        """A message of the assistant."""
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [] if self.status == "in_progress" else [self._content()],
        }

    def _content(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._logprobs,
        }

    def _part(self, type: str) -> Event:
        return self._inner(type, content_index=0, part=self._content())

    def _deltas(self, text: str, logprobs: list[Any]) -> list[Event]:
        self._logprobs += logprobs
        type = "response.output_text.delta"
        return [self._inner(type, content_index=0, delta=text, logprobs=logprobs)]

    def _last(self) -> list[Event]:
        type = "response.output_text.done"
        whole = self._logprobs
        done = self._inner(type, content_index=0, text=self.text, logprobs=whole)
        return [done, self._part("response.content_part.done")]


class Thought(Item):
    """Reasoning as its content. `sealed` adds it in the form that stateless clients send back."""

    prefix = "rs"
    field = "content"
    part_type = "reasoning_text"
    place = "content_index"
    text_event = "response.reasoning_text"
    part_event = "response.content_part"

    def __init__(self, index: int, sealed: bool):
        super().__init__(index)
        self._sealed = sealed

    def begin(self) -> list[Event]:
        """The item, empty, and its only part."""
        return [*super().begin(), self._part("added")]

    def shape(self) -> dict[str, Any]:
        """A reasoning item."""
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": self.status}
        item["summary"] = []
        if self.status == "in_progress":
            item[self.field] = []
        else:
            item[self.field] = [self._content()]
        if self._sealed:
            item["encrypted_content"] = seal(self.text)
        return item

    def _content(self) -> dict[str, str]:
        return {"type": self.part_type, "text": self.text}

    def _part(self, change: str) -> Event:
        return self._inner(f"{self.part_event}.{change}", part=self._content(), **{self.place: 0})

    def _deltas(self, text: str, logprobs: list[Any]) -> list[Event]:
        return [self._inner(f"{self.text_event}.delta", delta=text, **{self.place: 0})]

    def _last(self) -> list[Event]:
        done = self._inner(f"{self.text_event}.done", text=self.text, **{self.place: 0})
        return [done, self._part("done")]


class Summary(Thought):
    """Reasoning as its own summary, for clients that requested one: there they look for it."""

    field = "summary"
    part_type = "summary_text"
    place = "summary_index"
    text_event = "response.reasoning_summary_text"
    part_event = "response.reasoning_summary_part"


class Call(Item):
    """A call of a tool.

    Attributes:
        origin: the tool as the request named it.
    """

    prefix = "fc"

    def __init__(self, index: int, call_id: str, origin: Origin):
        super().__init__(index)
        self.call_id = call_id
        self.origin = origin

    def shape(self) -> dict[str, Any]:
        """A function call."""
        return self._named("function_call", "arguments", self.text)

    def _named(self, type: str, field: str, text: str) -> dict[str, Any]:
        item = {"id": self.id, "type": type, "status": self.status, "call_id": self.call_id}
        item |= {"name": self.origin.name, field: text}
        if self.origin.namespace is not None:
            item["namespace"] = self.origin.namespace
        return item

    def _deltas(self, text: str, logprobs: list[Any]) -> list[Event]:
        return [self._inner("response.function_call_arguments.delta", delta=text)]

    def _last(self) -> list[Event]:
        type = "response.function_call_arguments.done"
        return [self._inner(type, name=self.origin.name, arguments=self.text)]


class CustomCall(Call):
    """A call of a tool that takes plain text, which is sent when the call ends: until then it is a
    member of a JSON object."""

    prefix = "ctc"

    def shape(self) -> dict[str, Any]:
        """A custom tool call."""
        return self._named("custom_tool_call", "input", self._input())

    def _input(self) -> str:
        """The member `input`; of a broken call, what there is."""
        if self.status == "in_progress":
            return ""
        try:
            arguments = orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return self.text
        value = None
        if isinstance(arguments, dict):
            value = arguments.get(INPUT)
        if isinstance(value, str):
            return value
        return self.text

    def _deltas(self, text: str, logprobs: list[Any]) -> list[Event]:
        return []

    def end(self, complete: bool) -> list[Event]:
        """The input as one delta, then the call."""
        if complete:
            self.status = "completed"
        else:
            self.status = "incomplete"
        text = self._input()
        type = "response.custom_tool_call_input"
        return [
            self._inner(f"{type}.delta", delta=text),
            self._inner(f"{type}.done", input=text),
            self._event("response.output_item.done", item=self.shape()),
        ]


class Compaction(Item):
    """A summary of the conversation, which stands for it."""

    prefix = "cmp"

    def shape(self) -> dict[str, Any]:
        """A compaction item."""
        return {"id": self.id, "type": "compaction", "encrypted_content": seal(self.text)}
