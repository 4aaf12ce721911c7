"""Prompts as the generating endpoints make them, without running them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import orjson

from jaxllm.messages import GenerateRequest
from jaxllm.sampling.options import default_of
from jaxllm.server.endpoint import send_json
from jaxllm.server.generate import Chat, Completions, Generate
from jaxllm.server.requests.sampling import WIRE_OPTIONS
from jaxllm.server.transport.gone import unless_gone


class Render(Generate):
    """Put before a generating endpoint, it answers with the prompts that the endpoint would run:
    parsing, checks and tokens are the endpoint's."""

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        requests, *_ = await unless_gone(gone, self._prepare(secrets.token_hex(16), request))
        bodies = [self.rendered(request, engine_request) for engine_request in requests]
        # Biases are by token id
        body = orjson.dumps(self.shape(bodies), option=orjson.OPT_NON_STR_KEYS)
        await send_json(body, send)

    def rendered(self, request: Any, engine_request: GenerateRequest) -> dict[str, Any]:
        """One prompt, with the options that differ from their defaults."""
        changed = {
            name: value
            for name in WIRE_OPTIONS
            if (value := getattr(engine_request.params, name)) != default_of(name)
        }
        return {
            "request_id": self.reply.prefix + engine_request.id,
            "token_ids": engine_request.prompt.tokens,
            "model": request.generation.model,
            "sampling_params": changed,
            "stream": request.generation.streaming.enabled,
            "cache_salt": engine_request.cache_salt,
        }

    def shape(self, bodies: list[dict[str, Any]]) -> Any:
        """The reply to a request that may hold several prompts."""
        return bodies


class RenderCompletions(Render, Completions):
    """POST /v1/completions/render"""


class RenderChat(Render, Chat):
    """POST /v1/chat/completions/render"""

    def shape(self, bodies: list[dict[str, Any]]) -> Any:
        """A chat has one prompt."""
        return bodies[0]
