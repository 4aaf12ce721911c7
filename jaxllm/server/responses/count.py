"""POST /v1/responses/input_tokens: how long the prompt of a response would be."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from jaxllm.server.endpoint import send_json
from jaxllm.server.responses.compact import NOT_HERE
from jaxllm.server.responses.create import Create
from jaxllm.server.responses.requests import ResponsesRequest
from jaxllm.server.transport.gone import unless_gone


class InputTokens(Create):
    """Counts the tokens of a prompt, which may be longer than the context. With `truncation: auto`
    they are those of the messages that would be kept."""

    counts = True

    def parse(self, body: dict[str, Any]) -> ResponsesRequest:
        """As of a response, whose model may be left out; what concerns the answer alone has no
        effect."""
        kept = {name: value for name, value in body.items() if name not in NOT_HERE}
        named = {"model": body.get("model") or self._state.rules.served[0], "store": False}
        return super().parse(kept | named)

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        (ids,) = await unless_gone(gone, self.tokenise(request))
        counted = {"object": "response.input_tokens", "input_tokens": len(ids)}
        await send_json(orjson.dumps(counted), send)
