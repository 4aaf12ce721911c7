"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from jaxllm.server.anthropic.replies import MessagesReply
from jaxllm.server.anthropic.requests import MESSAGES_FIELDS, parse_count, parse_messages
from jaxllm.server.endpoint import send_json
from jaxllm.server.generate import Chat
from jaxllm.server.requests.chat import ChatRequest
from jaxllm.server.transport.gone import unless_gone


class Messages(Chat):
    """POST /v1/messages"""

    fields = MESSAGES_FIELDS
    reply = MessagesReply

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """See `requests.parse_messages`."""
        return parse_messages(body, self._state.rules)


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: a prompt may be longer than the context."""

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """See `requests.parse_count`."""
        return parse_count(body, self._state.rules)

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        (ids,) = await unless_gone(gone, self.tokenise(request))
        await send_json(orjson.dumps({"input_tokens": len(ids)}), send)
