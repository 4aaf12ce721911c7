"""Replies whose choices are parts: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from jaxllm.server.parsing.parts import Part, Text, merged


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
        super().add_delta(prompt, delta)
        if self.parsed:
            choice = self._choices[prompt * self._n + delta.index]
            choice.text.clear()
            choice.parts += self._parts(choice, delta)

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
        if pipeline.thinking:
            choice.reasoning_tokens += len(delta.token_ids)
        parts = pipeline.feed(delta.text)
        if delta.finish_reason is not None:
            parts += pipeline.finish()
        return parts if len(parts) < 2 else merged(parts)

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
