"""The shapes of what goes back: completions and chats, whole and in chunks, log-probabilities, usage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from jaxllm.engine.request import TextDelta, TokenLogprobs
from jaxllm.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for -inf, which JSON cannot say
DONE = b"data: [DONE]\n\n"


class TokenNames(Protocol):
    """What turns ids into strings for log-probabilities."""

    def token_text(self, id: int) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


class NamelessTokens:
    """Stands in when the server runs without a tokenizer."""

    def token_text(self, id: int) -> str:
        """The id, in the field's notation."""
        return f"token_id:{id}"

    def token_bytes(self, id: int) -> bytes:
        """The bytes of `token_text`."""
        return self.token_text(id).encode()


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    offset: int = 0  # characters of the tokens whose logprobs were sent
    started: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Reply:
    """All choices of one HTTP request; subclasses know the endpoint's shape. Choice number = prompt × n + index."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, id: str, model: str, fingerprint: str, prompts: list[int], n: int, names: TokenNames):
        self.id = self.prefix + id
        self.created = int(time.time())
        self._static = {"created": self.created, "model": model, "system_fingerprint": fingerprint}
        self._prompts, self._n, self._names = prompts, n, names  # prompt lengths in tokens
        self._choices = [Choice() for _ in range(len(prompts) * n)]
        self._cached = [0] * len(prompts)
        self._head = b"data: " + orjson.dumps({"id": self.id, "object": self.chunk_kind, **self._static})[:-1] + b',"choices":['
        self._tail = b"]}\n\n"
        self._always = False

    def with_usage(self, at_end: bool, always: bool) -> None:
        """Which chunks say the usage; those that do not say null once a client has asked for it."""
        self._always = always
        if at_end:
            self._tail = b'],"usage":null}\n\n'

    def add(self, prompt: int, delta: TextDelta) -> None:
        """Take a delta of a reply that is sent whole."""
        choice = self._note(prompt, delta)
        choice.text.append(delta.text)
        choice.logprobs += delta.logprobs or ()

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The server-sent events for one delta."""
        choice = self._note(prompt, delta)
        index = prompt * self._n + delta.index
        tail = b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n" if self._always else self._tail
        return b"".join(self._head + orjson.dumps(body) + tail for body in self._chunks(index, choice, delta))

    def usage_event(self) -> bytes:
        """The chunk without choices that ends a stream for clients that asked for usage."""
        return self._head + b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"

    def whole(self) -> dict[str, Any]:
        """The reply that is sent at once."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {"id": self.id, "object": self.kind, **self._static, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt, completion = sum(self._prompts), sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _note(self, prompt: int, delta: TextDelta) -> Choice:
        choice = self._choices[prompt * self._n + delta.index]
        choice.tokens += len(delta.token_ids)
        self._cached[prompt] = max(self._cached[prompt], delta.num_cached_tokens)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class CompletionReply(Reply):
    """/v1/completions"""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        body = {"index": index, "text": delta.text, "logprobs": self._logprobs(choice, delta.logprobs)}
        return [body | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        body = {"index": index, "text": "".join(choice.text), "logprobs": self._logprobs(choice, choice.logprobs or None)}
        return body | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _logprobs(self, choice: Choice, found: list[TokenLogprobs] | None) -> dict[str, list[Any]] | None:
        if found is None:
            return None
        shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for at in found:
            text, logprob = self._names.token_text(at.token_id), finite(at.logprob)
            top: dict[str, float] = {}
            for id, value in at.top:
                top.setdefault(self._names.token_text(id), finite(value))
            top.setdefault(text, logprob)
            for column, cell in zip(shape.values(), (text, logprob, top, choice.offset), strict=True):
                column.append(cell)
            choice.offset += len(text)
        return shape


class ChatReply(Reply):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        if not choice.started:
            choice.started = True
            opening = {"role": "assistant", "content": ""}
            chunks.append({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            said = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
            body = {"index": index, "delta": said, "logprobs": self._logprobs(delta.logprobs), "finish_reason": delta.finish_reason}
            if delta.finish_reason is not None:
                body["stop_reason"] = delta.stop_reason
            chunks.append(body)
        return chunks

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        body = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs or None)}
        return body | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _logprobs(self, found: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        content = []
        for at in found:
            top = [self._named(id, value) for id, value in at.top]
            content.append(self._named(at.token_id, at.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _named(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self._names.token_text(id), "logprob": finite(logprob), "bytes": list(self._names.token_bytes(id))}


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry; NaN counts as the lowest."""
    return logprob if logprob > LOWEST else LOWEST


def names_of(tokenizer: Tokenizer | None) -> TokenNames:
    """Strings of tokens, from the tokenizer where there is one."""
    return tokenizer if tokenizer is not None else NamelessTokens()
