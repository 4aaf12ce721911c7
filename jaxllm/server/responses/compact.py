"""POST /v1/responses/compact: a conversation as the user's messages and a summary."""

from __future__ import annotations

from typing import Any

import orjson

from jaxllm.server.responses.create import Create
from jaxllm.server.responses.history import encode
from jaxllm.server.responses.reply import ResponsesReply
from jaxllm.server.responses.requests import ResponsesRequest

NOT_HERE = frozenset({"stream", "stream_options", "background", "store"})


class CompactReply(ResponsesReply):
    """The items that replace a conversation: messages of the user, then the summary."""

    def full_reply(self) -> dict[str, Any]:
        """The reply."""
        made = super().full_reply()
        request = self.answer.request
        if request.before is not None:
            before = request.before.history()
        else:
            before = []
        items = [orjson.loads(item) for _, item in [*before, *map(encode, request.items)]]
        kept = [item for item in items if item["type"] == "message" and item["role"] == "user"]
        return {
            "id": made["id"],
            "object": "response.compaction",
            "created_at": made["created_at"],
            "output": kept + made["output"],
            "usage": made["usage"],
        }


class Compact(Create):
    """Makes a summary, which is not stored: the client sends it back."""

    shape = CompactReply
    compacts = True

    def parse(self, body: dict[str, Any]) -> ResponsesRequest:
        """As of a response, but neither stored nor streamed."""
        return super().parse(
            {name: value for name, value in body.items() if name not in NOT_HERE} | {"store": False}
        )
