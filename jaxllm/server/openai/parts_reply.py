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
            if delta.text:
                return [Text(delta.text)]
            return []
        if len(delta.token_ids) > 1:  # a thought may end within
            return merged(
                [part for one in self._by_token(delta) for part in self._parts(choice, one)]
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
    """A delta for each token of one, as if they had come one at a time. Text that was held back
    before comes with the first, and text that is no token's own with the last."""
    ids = delta.token_ids
    text = delta.text.encode()
    packed = delta.logprobs
    width = 0
    if packed is not None:
        width = len(packed) // len(ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = 0
    for number, (id, end) in enumerate(zip(ids, _ends(text, ids, names), strict=True)):
        last = number == len(ids) - 1
        row = None
        if packed is not None:
            row = packed[number * width :][:width]
        piece = decoder.decode(text[at : len(text) if last else end], last)
        at = end
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
    owns = [names.token_bytes(id) for id in ids]
    ways = (_laid(text, owns, first) for first in range(max(1, min(len(text), HELD_BACK))))
    return next((ends for ends, reach in ways if reach), None) or _laid(text, owns, 0)[0]


def _laid(text: bytes, owns: list[bytes], at: int) -> tuple[list[int], bool]:
    """Where each token's text ends if the first begins there; those that do not follow have none.
    And whether they reach the end of the text, of which the last one's may be held back."""
    ends = []
    cut = False
    for own in owns:
        at += len(own) if text.startswith(own, at) else 0
        cut = cut or (at < len(text) and own.startswith(text[at:]))
        ends.append(at)
    return ends, cut or at == len(text)
