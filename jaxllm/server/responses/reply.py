"""Replies of /v1/responses: one response, whole or as named events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.messages import TextDelta
from jaxllm.server.errors import ApiError
from jaxllm.server.openai.parts_reply import PartsReply, is_thinking
from jaxllm.server.openai.replies import ReplySpec, TokenNames, unpack_delta
from jaxllm.server.parsing.parts import Text
from jaxllm.server.responses.output import Output
from jaxllm.server.responses.output_items import Event
from jaxllm.server.responses.requests import ResponsesRequest


class Answer:
    """A response as it grows, from before its first token.

    Attributes:
        status: queued, in_progress, completed, incomplete, failed or cancelled.
        stored: whether it can be retrieved.
        output: its items.
        usage: token counts; None until it ends.
        error: why it failed.
    """

    def __init__(self, id: str, request: ResponsesRequest, stored: bool, output: Output):
        self.id = id
        self.request = request
        self.stored = stored
        self.output = output
        if request.background:
            self.status = "queued"
        else:
            self.status = "in_progress"
        self.created = int(time.time())
        self.ended: int | None = None
        self.usage: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self._events = 0

    @property
    def running(self) -> bool:
        """Whether it still grows."""
        return self.status in ("queued", "in_progress")

    def end(self, status: str, usage: dict[str, Any] | None) -> list[Event]:
        """Its end, and the events of items that were open."""
        events = self.output.finish(status == "completed")
        self.status, self.usage, self.ended = status, usage, int(time.time())
        return events

    def fail(self, error: ApiError, usage: dict[str, Any] | None) -> list[Event]:
        """Its end by an error."""
        self.error = error
        return self.end("failed", usage)

    def shape(self) -> dict[str, Any]:
        """The response's object."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self.ended if self.status == "completed" else None,
            "status": self.status,
            "background": self.request.background,
            "error": self._error(),
            "incomplete_details": self._incomplete(),
            "output": self.output.snapshot(),
            "usage": self.usage,
            "store": self.stored,
            **self.request.shown,
        }

    def encoded(self, events: Iterable[Event]) -> list[bytes]:
        """Server-sent events, numbered in order."""
        frames = []
        for event in events:
            data = orjson.dumps(event | {"sequence_number": self._events})
            frames.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
            self._events += 1
        return frames

    def told(self, change: str) -> Event:
        """An event about the response itself."""
        return {"type": f"response.{change}", "response": self.shape()}

    def opening(self) -> list[Event]:
        """The first events: of a response that waits, or that has begun."""
        if self._events == 0:
            return [self.told("created"), self.told(self.status)]
        return [self.told(self.status)]

    def _error(self) -> dict[str, Any] | None:
        if self.error is None:
            return None
        code = "invalid_prompt"
        if self.error.status >= 500:
            code = "server_error"
        return {"code": code, "message": self.error.message, "param": self.error.param}

    def _incomplete(self) -> dict[str, str] | None:
        if self.status == "incomplete":
            return {"reason": "max_output_tokens"}
        return None


class ResponsesReply(PartsReply):
    """/v1/responses; `answer` is what it fills."""

    def __init__(self, answer: Answer, fingerprint: str, spec: ReplySpec, names: TokenNames):
        super().__init__(answer.id, answer.request.generation.model, fingerprint, spec, 1, names)
        self.answer = answer
        self._started = False

    def add_delta(self, prompt: int, delta: TextDelta) -> None:
        """Add a delta to a reply that is sent whole."""
        self.answer.status = "in_progress"
        self._grow(prompt, delta)

    def full_reply(self) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        self.answer.end(self._status(), self._usage())
        return self.answer.shape()

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The server-sent events for one delta."""
        events: list[Event] = []
        if not self._started:
            self._started = True
            self.answer.status = "in_progress"
            events += self.answer.opening()
        return b"".join(self.answer.encoded(events + self._grow(prompt, delta)))

    def last_events(self) -> bytes:
        """What ends a stream: the rest of the output, and the whole response."""
        return self._told(self.answer.end(self._status(), self._usage()))

    def error_events(self, error: ApiError) -> bytes:
        """What ends a stream that has failed: what there is, and why there is no more."""
        return self._told(self.answer.fail(error, self._usage()))

    def _told(self, events: list[Event]) -> bytes:
        last = self.answer.told(self.answer.status)
        return b"".join(self.answer.encoded([*events, last]))

    def _grow(self, prompt: int, delta: TextDelta) -> list[Event]:
        """The events of a delta's parts. Log-probabilities are those of a part's own tokens."""
        if delta.logprobs is not None and len(delta.token_ids) > 1:
            token_deltas = self._by_token(delta)
            return [
                event for token_delta in token_deltas for event in self._grow(prompt, token_delta)
            ]
        choice = self._update_choice(prompt, delta)
        thought = is_thinking(choice)
        parts = self._parts(choice, delta)
        thought = thought or is_thinking(choice)
        of_text = not thought or any(isinstance(part, Text) for part in parts)
        logprobs = None
        if of_text:
            logprobs = self._entries(unpack_delta(delta) or ())
        return self.answer.output.feed(parts, logprobs)

    def _status(self) -> str:
        if self._choices[0].finish_reason == "length":
            return "incomplete"
        return "completed"

    def _usage(self) -> dict[str, Any]:
        """Token counts by the names of this endpoint."""
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._choices[0].reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }
