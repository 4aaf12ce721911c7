"""Replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.messages import TextDelta, TokenLogprobs
from jaxllm.server.openai.parts_reply import PartsReply, by_token, is_thinking
from jaxllm.server.openai.replies import Choice, Frame, unpack_delta
from jaxllm.server.parsing.parts import (
    Part,
    Reasoning,
    Text,
    TextPart,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from jaxllm.server.parsing.pipeline import ALL

GOES_ON = b',"logprobs":null,"finish_reason":null}'  # the end of most chunks
CONTENT = b'{"content":'


class ChatReply(PartsReply):
    """/v1/chat/completions"""

    prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _first_head(self, prompt: int) -> bytes:
        ids = self._prompt_token_ids(prompt)
        if not ids:
            return self._event_head
        return self._event_begin + b"," + orjson.dumps(ids)[1:-1] + b',"choices":['

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[bytes]:
        chunks = []
        if not choice.started:
            choice.started = True
            choice.begin = b'{"index":%d,"delta":' % index
            opening = {"role": self._spec.role, "content": ""}
            deltas = [opening, *({"content": text} for text in self._spec.texts or ())]
            if self._spec.token_ids:
                goes_on = GOES_ON[:-1] + b',"token_ids":[]}'
            else:
                goes_on = GOES_ON
            chunks = [choice.begin + orjson.dumps(fields) + goes_on for fields in deltas]
        whole = delta.finish_reason is not None or delta.logprobs is not None
        if whole or self._spec.token_ids:
            choice.frame = None
            return chunks + self._full_chunks(choice, delta)
        if delta.token_ids or delta.text:
            chunks += [
                choice.begin + fragment + GOES_ON for fragment in self._deltas(choice, delta)
            ]
            choice.frame = self._frame_of(choice)
        return chunks

    def _frame_of(self, choice: Choice) -> Frame | None:
        """The frame of the next event."""
        clear = ALL if choice.pipeline is None else choice.pipeline.clear
        if clear is None:
            return None
        return self._frame(clear, around(clear.make("")), choice.begin, GOES_ON)

    def _full_chunks(self, choice: Choice, delta: TextDelta) -> list[bytes]:
        """The first carries the log-probabilities and token ids, the last the finish reason."""
        if self.parsed and delta.logprobs is not None and len(delta.token_ids) > 1:
            token_deltas = by_token(delta, self._names)
            return [
                chunk
                for token_delta in token_deltas
                for chunk in self._full_chunks(choice, token_delta)
            ]
        thought = is_thinking(choice)
        deltas = self._deltas(choice, delta)
        ends = delta.finish_reason is not None
        logprobs = None
        if deltas or not self._hidden(choice, thought):
            logprobs = self._logprobs(unpack_delta(delta))
        brings_ids = self._spec.token_ids and bool(delta.token_ids)
        if not deltas and logprobs is None and not ends and not brings_ids:
            return []
        # A chunk of its own, unless the answer ends with text
        if not deltas or (ends and not deltas[-1].startswith(CONTENT)):
            deltas.append(b"{}")
        common = {"logprobs": None, "finish_reason": None} | self._token_ids([])
        rest: list[dict[str, Any]] = [common.copy() for _ in deltas]
        rest[0] |= {"logprobs": logprobs} | self._token_ids(delta.token_ids)
        if ends:
            rest[-1] |= {"finish_reason": finish_reason(choice), "stop_reason": delta.stop_reason}
        return [
            choice.begin + fragment + b"," + orjson.dumps(fields)[1:]
            for fragment, fields in zip(deltas, rest, strict=True)
        ]

    def _deltas(self, choice: Choice, delta: TextDelta) -> list[bytes]:
        """What is new, as JSON."""
        parts = self._parts(choice, delta)
        if choice.pipeline is None and not delta.text and delta.finish_reason is None:
            parts = [Text("")]
        return [made for part in parts if (made := part_delta(part))]

    def _full_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._spec.texts or ()
        message: dict[str, Any] = {
            "role": self._spec.role,
            "content": "".join([*echo, *choice.text]),
            "refusal": None,
        }
        if self.parsed:
            message |= message_fields(choice.parts, "".join(echo))
        body = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        body |= {"finish_reason": finish_reason(choice), "stop_reason": choice.stop_reason}
        return body | self._token_ids(choice.token_ids)

    def full_reply(self) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        return super().full_reply() | self._prompt_logprobs(0) | self._prompt_token_ids(0)

    def _logprobs(self, tokens: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        return {"content": self._entries(tokens), "refusal": None}


def finish_reason(choice: Choice) -> str | None:
    """An answer that ends by itself with calls waits for their results; there are none of a call
    that a stop string has cut."""
    called = choice.called and choice.finish_reason == "stop" and not choice.cut
    if called:
        return "tool_calls"
    return choice.finish_reason


def part_delta(part: Part) -> bytes:
    """The delta of a chunk, as JSON; nothing for the end of a call, which is not told."""
    if isinstance(part, TextPart):
        return orjson.dumps(part.text).join(around(part))
    if isinstance(part, ToolEnd):
        return b""
    function = {"name": part.name, "arguments": ""}
    call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    return orjson.dumps({"tool_calls": [call]})


def around(part: TextPart) -> tuple[bytes, ...]:
    """What stands around the JSON of a part's text. Reasoning has it under both of its names."""
    if isinstance(part, Text):
        return CONTENT, b"}"
    if isinstance(part, Reasoning):
        return b'{"reasoning":', b',"reasoning_content":', b"}"
    return b'{"tool_calls":[{"index":%d,"function":{"arguments":' % part.index, b"}}]}"


def message_fields(parts: Iterable[Part], echo: str) -> dict[str, Any]:
    """The fields of a message that the parts of an answer make, after echoed text. `content` is
    null beside calls without text."""
    if echo:
        content = [echo]
    else:
        content = []
    reasoning = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Text(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolStart(_, name, id):
                calls.append({"id": id, "type": "function", "function": {"name": name}})
                arguments.append([])
            case ToolArguments(index, text):
                arguments[index].append(text)
    for call, texts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(texts)
    thought = "".join(reasoning) or None
    fields: dict[str, Any] = {"content": "".join(content)}
    if calls and not content:
        fields["content"] = None
    fields |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        fields["tool_calls"] = calls
    return fields
