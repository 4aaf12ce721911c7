"""Replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxllm.messages import TextDelta, TokenLogprobs
from jaxllm.server.openai.parts_reply import PartsReply
from jaxllm.server.openai.replies import Choice, unpack_delta
from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolArguments, ToolEnd, ToolStart


class ChatReply(PartsReply):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if not choice.started:
            choice.started = True
            opening = {"role": self._spec.role, "content": ""}
            deltas = [opening, *({"content": text} for text in self._spec.texts or ())]
            chunks = [
                {"index": index, "delta": part, "logprobs": None, "finish_reason": None}
                for part in deltas
            ]
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            chunks += self._delta_chunks(index, choice, delta)
        return chunks

    def _delta_chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        """The first carries the log-probabilities, the last the finish reason."""
        ends = delta.finish_reason is not None
        if choice.pipeline is None:
            deltas = [{"content": delta.text}] if delta.text or not ends else [{}]
        else:
            deltas = [
                DELTAS[type(part)](part)
                for part in self._parts(choice, delta)
                if type(part) is not ToolEnd
            ]
            # A chunk of its own, unless the answer ends with text
            if (ends and not (deltas and "content" in deltas[-1])) or (
                not deltas and delta.logprobs is not None
            ):
                deltas.append({})
        chunks: list[dict[str, Any]] = [
            {"index": index, "delta": part, "logprobs": None, "finish_reason": None}
            for part in deltas
        ]
        if delta.logprobs is not None:
            chunks[0]["logprobs"] = self._logprobs(unpack_delta(delta))
        if ends:
            chunks[-1]["finish_reason"] = finish_reason(choice)
            chunks[-1]["stop_reason"] = delta.stop_reason
        return chunks

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
        return body | {"finish_reason": finish_reason(choice), "stop_reason": choice.stop_reason}

    def full_reply(self) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        return super().full_reply() | self._prompt_logprobs(0)

    def _logprobs(self, found: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if found is None else {"content": self._entries(found), "refusal": None}


def finish_reason(choice: Choice) -> str | None:
    """An answer that ends by itself with calls waits for their results."""
    called = choice.calls and choice.finish_reason == "stop"
    return "tool_calls" if called else choice.finish_reason


def _start_delta(part: ToolStart) -> dict[str, Any]:
    function = {"name": part.name, "arguments": ""}
    call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


# The delta that tells a part
DELTAS: dict[type[Part], Callable[[Any], dict[str, Any]]] = {
    Text: lambda part: {"content": part.text},
    Reasoning: lambda part: {"reasoning": part.text, "reasoning_content": part.text},
    ToolStart: _start_delta,
    ToolArguments: lambda part: {
        "tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]
    },
}


def message_fields(parts: Iterable[Part], echo: str) -> dict[str, Any]:
    """The fields of a message that the parts of an answer make, after echoed text. `content` is
    null beside calls without text."""
    content, reasoning = [echo] if echo else [], []
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
    fields: dict[str, Any] = {"content": "".join(content) if content or not calls else None}
    fields |= {"reasoning": thought, "reasoning_content": thought}
    return fields | ({"tool_calls": calls} if calls else {})
