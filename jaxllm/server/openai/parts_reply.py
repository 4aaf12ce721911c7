"""Replies whose choices are parts: reasoning, text and tool calls."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from jaxllm.messages import TextDelta, TokenLogprobs
from jaxllm.server.openai.replies import (
    Choice,
    Reply,
    ReplySpec,
    TokenNames,
    finite,
    json_fragment,
)
from jaxllm.server.parsing.parts import Part, Text, ToolEnd, merged


class PartsReply(Reply):
    """What chat-like endpoints share; `parsed` is false for plain text."""

    def __init__(
        self, id: str, model: str, fingerprint: str, spec: ReplySpec, n: int, names: TokenNames
    ):
        super().__init__(id, model, fingerprint, spec, n, names)
        self.parsed = spec.new_pipeline is not None
        if spec.new_pipeline is not None:
            for choice in self._choices:
                choice.pipeline = spec.new_pipeline()

    def add_delta(self, prompt: int, delta: TextDelta) -> None:
        """Add a delta to a reply that is sent whole: to `Choice.parts`, or to `Choice.text` when
        nothing is parsed."""
        if not self.parsed:
            return super().add_delta(prompt, delta)
        for one in self._by_token(delta):
            choice = self._update_choice(prompt, one)
            thought = is_thinking(choice)
            parts = self._parts(choice, one)
            choice.parts += parts
            if self._spec.token_ids:
                choice.token_ids += one.token_ids
            if one.logprobs is not None and (parts or not self._hidden(choice, thought)):
                choice.scored += one.token_ids
                choice.packed += one.logprobs

    def usage(self) -> dict[str, Any]:
        """As of every reply, with the tokens of reasoning where it is told apart."""
        if not self.parsed:
            return super().usage()
        tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _parts(self, choice: Choice, delta: TextDelta) -> list[Part]:
        """The parts that a delta completes, neighbours joined; to be called once with each."""
        pipeline = choice.pipeline
        if pipeline is None:
            return [Text(delta.text)] if delta.text else []
        if len(delta.token_ids) > 1:  # a thought may end within
            return merged(
                [part for one in self._by_token(delta) for part in self._parts(choice, one)]
            )
        if pipeline.thinking:
            choice.reasoning_tokens += len(delta.token_ids)
        parts = pipeline.feed(delta.text)
        if delta.finish_reason is not None:
            parts += pipeline.finish()
            broken = any(isinstance(part, ToolEnd) and not part.complete for part in parts)
            choice.cut = broken and isinstance(delta.stop_reason, str)
        return parts if len(parts) < 2 else merged(parts)

    def _by_token(self, delta: TextDelta) -> Iterable[TextDelta]:
        """The deltas of its tokens: ranked choices come as one, and a thought may end within."""
        return (delta,) if len(delta.token_ids) < 2 else by_token(delta, self._names)

    def _hidden(self, choice: Choice, thought: bool) -> bool:
        """Whether a token that completed no part is one of hidden reasoning; `thought`: the text
        before it ended within reasoning."""
        return self._spec.hides_reasoning and (thought or is_thinking(choice))

    def _entries(self, found: Iterable[TokenLogprobs]) -> list[orjson.Fragment]:
        """Log-probabilities of tokens and of their alternatives."""
        return [
            json_fragment(
                self._entry(at.token_id, at.logprob)
                | {"top_logprobs": [self._entry(id, value) for id, value in at.top]}
            )
            for at in found
        ]

    def _entry(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.token_text(id),
            "logprob": finite(logprob),
            "bytes": list(self._names.token_bytes(id)),
        }


def is_thinking(choice: Choice) -> bool:
    """Whether the text so far ends within reasoning."""
    return choice.pipeline is not None and choice.pipeline.thinking


def by_token(delta: TextDelta, names: TokenNames) -> Iterator[TextDelta]:
    """A delta for each token of one, as if they had come one at a time. Text that is not a token's
    own comes with the last."""
    ids, text, at = delta.token_ids, delta.text.encode(), 0
    packed = delta.logprobs
    width = 0 if packed is None else len(packed) // len(ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for number, id in enumerate(ids):
        last = number == len(ids) - 1
        own = names.token_bytes(id)
        end = len(text) if last else at + len(own) if text.startswith(own, at) else at
        row = None if packed is None else packed[number * width :][:width]
        piece, at = decoder.decode(text[at:end], last), end
        if last:
            yield msgspec.structs.replace(delta, token_ids=[id], text=piece, logprobs=row)
        else:
            cached = delta.num_cached_tokens
            yield TextDelta(
                id=delta.id,
                index=delta.index,
                token_ids=[id],
                text=piece,
                logprobs=row,
                num_cached_tokens=cached,
            )
