"""Replies whose choices are parts: reasoning, text and tool calls."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
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

# Bytes of text held back before a delta that are looked for: each costs a pass over its tokens
HELD_BACK = 64


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
        for token_delta in self._by_token(delta):
            choice = self._update_choice(prompt, token_delta)
            thought = is_thinking(choice)
            parts = self._parts(choice, token_delta)
            choice.parts += parts
            if self._spec.token_ids:
                choice.token_ids += token_delta.token_ids
            if token_delta.logprobs is not None and (parts or not self._hidden(choice, thought)):
                choice.scored += token_delta.token_ids
                choice.packed += token_delta.logprobs

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
            if delta.text:
                return [Text(delta.text)]
            return []
        if len(delta.token_ids) > 1:  # a thought may end within
            return merged(
                [
                    part
                    for token_delta in self._by_token(delta)
                    for part in self._parts(choice, token_delta)
                ]
            )
        thought = pipeline.thinking
        parts = pipeline.feed(delta.text)
        if thought:
            choice.held_tokens += len(delta.token_ids)
            if not pipeline.holding:
                choice.reasoning_tokens += choice.held_tokens
                choice.held_tokens = 0
        if delta.finish_reason is not None:
            parts += pipeline.finish()
            if not pipeline.called:
                choice.reasoning_tokens += choice.held_tokens
            broken = any(isinstance(part, ToolEnd) and not part.complete for part in parts)
            choice.cut = broken and isinstance(delta.stop_reason, str)
        if len(parts) < 2:
            return parts
        return merged(parts)

    def _by_token(self, delta: TextDelta) -> Iterable[TextDelta]:
        """The deltas of its tokens: ranked choices come as one, and a thought may end within."""
        if len(delta.token_ids) < 2:
            return (delta,)
        return by_token(delta, self._names)

    def _hidden(self, choice: Choice, thought: bool) -> bool:
        """Whether a token that completed no part is one of hidden reasoning; `thought`: the text
        before it ended within reasoning."""
        return self._spec.hides_reasoning and (thought or is_thinking(choice))

    def _entries(self, tokens: Iterable[TokenLogprobs]) -> list[orjson.Fragment]:
        """Log-probabilities of tokens and of their alternatives."""
        return [
            json_fragment(
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(id, value) for id, value in token.top]}
            )
            for token in tokens
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
    """A delta for each token of one, as if they had come one at a time. Text that was held back
    before comes with the first, and text that is no token's own with the last."""
    ids = delta.token_ids
    text = delta.text.encode()
    packed = delta.logprobs
    width = 0
    if packed is not None:
        width = len(packed) // len(ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begin = 0
    for number, (id, end) in enumerate(zip(ids, _ends(text, ids, names), strict=True)):
        last = number == len(ids) - 1
        row = None
        if packed is not None:
            row = packed[number * width :][:width]
        if last:  # with what no token's text has
            end = len(text)
        piece = decoder.decode(text[begin:end], last)
        begin = end
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


def _ends(text: bytes, ids: Sequence[int], names: TokenNames) -> list[int]:
    """Where the text of each token ends. The first token's begins where those of all reach the end
    of the text, or else at once."""
    token_texts = [names.token_bytes(id) for id in ids]
    ways = (_laid(text, token_texts, first) for first in range(max(1, min(len(text), HELD_BACK))))
    return next((ends for ends, reach in ways if reach), None) or _laid(text, token_texts, 0)[0]


def _laid(text: bytes, token_texts: list[bytes], position: int) -> tuple[list[int], bool]:
    """Where each token's text ends if the first begins at `position`; a token whose text does not
    follow has none. And whether they reach the end of the text, where a part of the last token's
    may be held back."""
    ends = []
    cut = False
    for token_text in token_texts:
        if text.startswith(token_text, position):
            position += len(token_text)
        cut = cut or (position < len(text) and token_text.startswith(text[position:]))
        ends.append(position)
    return ends, cut or position == len(text)
