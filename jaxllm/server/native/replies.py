"""Replies of /generate."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.messages import TextDelta
from jaxllm.server.errors import ApiError
from jaxllm.server.openai.replies import Choice, Reply, ReplySpec, TokenNames


class VllmReply(Reply):
    """`{"text": [prompt and text of each choice]}`; a stream is such objects, one a line."""

    stream_type = b"application/x-ndjson"

    def all_events(self, deltas: Iterable[tuple[int, TextDelta]]) -> bytes:
        """The texts so far."""
        for prompt, delta in deltas:
            self.add_delta(prompt, delta)
        return orjson.dumps(self.full_reply()) + b"\n"

    def last_events(self) -> bytes:
        """Such a stream just ends."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        """A last line with the error."""
        return orjson.dumps(error.envelope()) + b"\n"

    def full_reply(self) -> dict[str, Any]:
        """The texts so far, each after the prompt."""
        (prompt,) = self._spec.texts or ("",)
        return {"text": [prompt + "".join(choice.text) for choice in self._choices]}


class SglangReply(Reply):
    """`{"text", "output_ids", "meta_info"}` of a choice, or a list of these."""

    def __init__(
        self, id: str, model: str, fingerprint: str, spec: ReplySpec, n: int, names: TokenNames
    ):
        super().__init__(id, model, fingerprint, spec, n, names)
        self.batch = False
        self._began = time.monotonic()

    @property
    def _listed(self) -> bool:
        """Whether the reply is a list."""
        return self.batch or len(self._choices) > 1

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The choice so far."""
        self.add_delta(prompt, delta)
        index = prompt * self._n + delta.index
        body = self._full_choice(index, self._choices[index])
        if self._listed:
            body["index"] = index
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def full_reply(self) -> Any:
        """The choice, or all of them in order."""
        choices = [self._full_choice(index, choice) for index, choice in enumerate(self._choices)]
        if self._listed:
            return choices
        return choices[0]

    def _full_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        prompt = index // self._n
        id = self.id
        if self._listed:
            id = f"{id}-{index}"
        return {
            "text": "".join(choice.text),
            "output_ids": choice.token_ids,
            "meta_info": {
                "id": id,
                "finish_reason": finish(choice),
                "prompt_tokens": len(self._spec.prompts[prompt]),
                "completion_tokens": choice.tokens,
                "cached_tokens": self._cached[prompt],
                "e2e_latency": time.monotonic() - self._began,
            },
        }


def finish(choice: Choice) -> dict[str, Any] | None:
    """SGLang's form of why a choice ended; None while it runs."""
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "length":
        return {"type": "length", "length": choice.tokens}
    return {"type": choice.finish_reason, "matched": choice.stop_reason}
