"""Replies of /v1/messages: content blocks, whole or as events."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.messages import TextDelta
from jaxllm.server.anthropic.errors import envelope
from jaxllm.server.anthropic.salvage import read_arguments
from jaxllm.server.errors import ApiError
from jaxllm.server.openai.parts_reply import PartsReply
from jaxllm.server.openai.replies import Choice, ReplySpec, TokenNames
from jaxllm.server.parsing.parts import (
    Part,
    Reasoning,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
    merged,
)

STOP_REASONS = {"length": "max_tokens"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesReply(PartsReply):
    """/v1/messages"""

    prefix = "msg_"
    object_name = "message"

    def __init__(
        self, id: str, model: str, fingerprint: str, spec: ReplySpec, n: int, names: TokenNames
    ):
        super().__init__(id, model, fingerprint, spec, n, names)
        self._model = model
        self._blocks = BlockEvents()

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The events for one delta; the first come with the beginning of the message."""
        choice = self._update_choice(prompt, delta)
        events = []
        if not choice.started:
            choice.started = True
            message = self._message([], None) | {"usage": self._usage() | {"output_tokens": 0}}
            events = [event("message_start", {"message": message}), PING]
        for part in self._parts(choice, delta):
            events += self._blocks.feed(part)
        return b"".join(events)

    def last_events(self) -> bytes:
        """The end of the last block and of the message."""
        (choice,) = self._choices
        reason = stop_reason(choice)
        changes = {"stop_reason": reason, "stop_sequence": stop_sequence(choice)}
        return b"".join(
            [
                *self._blocks.close(),
                event("message_delta", {"delta": changes, "usage": self._usage()}),
                event("message_stop", {}),
            ]
        )

    def error_events(self, error: ApiError) -> bytes:
        """A failed stream ends with this event; the request's id is in the head."""
        return b"event: error\ndata: " + orjson.dumps(envelope(error, None)) + b"\n\n"

    def full_reply(self) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        (choice,) = self._choices
        if self.parsed:
            parts = choice.parts
        else:
            parts = [Text(text) for text in choice.text if text]
        return self._message(blocks_of(merged(parts)), choice)

    def _message(self, content: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        """The message; without a choice, one that has just begun."""
        reason = None
        sequence = None
        if choice is not None:
            reason = stop_reason(choice)
            sequence = stop_sequence(choice)
        return {
            "id": self.id,
            "type": self.object_name,
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Token counts so far; cached prompt tokens count apart."""
        cached = sum(self._cached)
        (choice,) = self._choices
        counts: dict[str, Any] = {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": choice.tokens,
        }
        if self.parsed:
            counts["output_tokens_details"] = {"thinking_tokens": choice.reasoning_tokens}
        return counts


class BlockEvents:
    """Parts to the events of content blocks, one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[Part] | None = None  # the part that the open block is made of
        self._thought = hashlib.sha256()

    def feed(self, part: Part) -> list[bytes]:
        """The events of one part."""
        match part:
            case Text(text):
                return [*self._begin(Text, text_block("")), self._delta("text_delta", "text", text)]
            case Reasoning(text):
                begun = self._begin(Reasoning, thinking_block("", ""))
                self._thought.update(text.encode())
                return [*begun, self._delta("thinking_delta", "thinking", text)]
            case ToolStart(_, name, id):
                return [*self.close(), *self._begin(ToolStart, tool_block(id, name))]
            case ToolArguments(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]
        return self.close()

    def close(self) -> list[bytes]:
        """The end of the open block, if any."""
        if self._open is None:
            return []
        signed = []
        if self._open is Reasoning:
            signed = [self._delta("signature_delta", "signature", signature(self._thought))]
        self._open = None
        return [*signed, event("content_block_stop", {"index": self._index})]

    def _begin(self, part_type: type[Part], block: dict[str, Any]) -> list[bytes]:
        """Open a block, unless one of its kind is open."""
        if self._open is part_type:
            return []
        closed = self.close()
        self._open = part_type
        self._index += 1
        self._thought = hashlib.sha256()
        start = {"index": self._index, "content_block": block}
        return [*closed, event("content_block_start", start)]

    def _delta(self, delta_type: str, name: str, text: str) -> bytes:
        delta = {"type": delta_type, name: text}
        return event("content_block_delta", {"index": self._index, "delta": delta})


def blocks_of(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """The content blocks that merged parts make."""
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    for part in parts:
        match part:
            case Text(text):
                blocks.append(text_block(text))
            case Reasoning(text):
                digest = hashlib.sha256(text.encode())
                blocks.append(thinking_block(text, signature(digest)))
            case ToolStart(_, name, id):
                arguments = []
                blocks.append(tool_block(id, name))
            case ToolArguments(_, text):
                arguments.append(text)
            case ToolEnd():
                blocks[-1]["input"] = read_arguments("".join(arguments))
    return blocks


def text_block(text: str) -> dict[str, Any]:
    """A block of text."""
    return {"type": "text", "text": text}


def thinking_block(text: str, signed: str) -> dict[str, Any]:
    """A block of reasoning."""
    return {"type": "thinking", "thinking": text, "signature": signed}


def tool_block(id: str | None, name: str) -> dict[str, Any]:
    """A call, still without arguments."""
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def signature(thought: Any) -> str:
    """What stands for a signature, which clients send back and nobody checks: a digest."""
    return base64.b64encode(thought.digest()).decode()


def stop_reason(choice: Choice) -> str:
    """Why the message ended."""
    if choice.finish_reason != "stop":
        return STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    if isinstance(choice.stop_reason, str):
        return "stop_sequence"
    if choice.called:
        return "tool_use"
    return "end_turn"


def stop_sequence(choice: Choice) -> str | None:
    """The text that ended the message, if one of `stop_sequences` did."""
    if stop_reason(choice) != "stop_sequence":
        return None
    assert isinstance(choice.stop_reason, str), "only a text is a stop sequence"
    return choice.stop_reason


def event(name: str, body: dict[str, Any]) -> bytes:
    """A server-sent event of that type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name} | body))
