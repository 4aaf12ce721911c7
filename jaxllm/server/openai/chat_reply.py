"""Replies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm.messages import TextDelta, TokenLogprobs
from jaxllm.server.openai.replies import Choice, Reply, finite, json_fragment, unpack_delta


class ChatReply(Reply):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if not choice.started:
            choice.started = True
            opening = {"role": self._echo.role, "content": ""}
            deltas = [opening, *({"content": text} for text in self._echo.texts or ())]
            chunks = [
                {"index": index, "delta": part, "logprobs": None, "finish_reason": None}
                for part in deltas
            ]
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            part = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
            body = {
                "index": index,
                "delta": part,
                "logprobs": self._logprobs(unpack_delta(delta)),
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                body["stop_reason"] = delta.stop_reason
            chunks.append(body)
        return chunks

    def _full_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {
            "role": self._echo.role,
            "content": "".join([*(self._echo.texts or ()), *choice.text]),
            "refusal": None,
        }
        body = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        return body | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def full_reply(self) -> dict[str, Any]:
        """The reply that is sent at once."""
        return super().full_reply() | self._prompt_logprobs(0)

    def _logprobs(self, found: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        content = []
        for at in found:
            top = [self._named(id, value) for id, value in at.top]
            content.append(
                json_fragment(self._named(at.token_id, at.logprob) | {"top_logprobs": top})
            )
        return {"content": content, "refusal": None}

    def _named(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.token_text(id),
            "logprob": finite(logprob),
            "bytes": list(self._names.token_bytes(id)),
        }
