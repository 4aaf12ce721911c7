"""What the pooling routes share: prompts through the engine, and their vectors."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from jaxllm.messages import PoolingRequest
from jaxllm.pooled import result
from jaxllm.prompt import Prompt
from jaxllm.server.endpoint import Endpoint, Reply
from jaxllm.server.errors import ApiError, ContextOverflow, bad_request
from jaxllm.server.pooling.requests import Options
from jaxllm.server.transport.gone import unless_gone
from jaxllm.tokenizer import Pair, Tokenizer

LARGE = 1 << 16  # numbers of a reply that is written in a thread
MAX_KEPT = 1 << 26  # numbers of all vectors of one reply


class Pooled(NamedTuple):
    """The vectors of a request's prompts, and the tokens of all prompts."""

    vectors: list[np.ndarray]
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's form."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


class PoolingEndpoint(Endpoint):
    """A route that answers when all its prompts have vectors. Subclasses parse, tokenise and write
    the reply.

    Attributes:
        prefix: begins the reply's id.
        cut: how a request says that inputs may be cut.
    """

    param = "input"
    prefix = ""
    cut = "send truncate_prompt_tokens"

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        options = self.options(request)
        id = secrets.token_hex(16)
        prompts = await unless_gone(gone, self.tokenise(request))
        vectors = len(prompts)
        if options.pooling.of_tokens:
            vectors = sum(len(prompt.ids) for prompt in prompts)
        numbers = options.pooling.size * vectors
        if numbers > MAX_KEPT:
            raise bad_request("too many vectors for one reply; send fewer inputs", self.param)
        is_cut = options.params.truncate_prompt_tokens is not None
        remedy = "shorten it"
        if not is_cut:
            remedy = f"shorten it or {self.cut}"
        for index, prompt in enumerate(prompts):
            self._check_length(len(prompt.ids), self.field(request, index), remedy)
        pooled = await self._pool(id, prompts, options, gone)
        reply = (request, f"{self.prefix}-{id}", pooled)
        if numbers > LARGE:
            made = await asyncio.to_thread(self.reply, *reply)
        else:
            made = self.reply(*reply)
        await made.send(send)

    def _check_length(self, tokens: int, param: str, remedy: str) -> None:
        """Refuse an empty input, and one longer than the model takes."""
        if not tokens:
            raise bad_request(f"{param} has no tokens; send a text", param, "empty_prompt")
        if tokens > (limit := self._state.resolved.max_model_len):
            raise ContextOverflow(limit, tokens, param, remedy=remedy, generates=False)

    async def _pool(
        self, id: str, prompts: list[Pair], options: Options, gone: asyncio.Future[None]
    ) -> Pooled:
        """Run the prompts. Raises the ApiError of the first that fails."""
        requests = [
            PoolingRequest(
                id=f"{id}-{number}",
                prompt=Prompt(prompt.ids),
                params=options.engine,
                cache_salt=options.cache_salt,
                second_text=prompt.second,
            )
            for number, prompt in enumerate(prompts)
        ]
        stream = self._submit(requests, gone)
        stream.field_names["prompt"] = self.param
        vectors: dict[int, np.ndarray] = {}
        try:
            while not stream.done:
                for number, delta in await stream.next_deltas():
                    if delta.pooled is None:
                        raise ApiError(500, "the engine gave no result", code="internal_error")
                    vectors[number] = result(options.pooling, delta.pooled, options.params)
        finally:
            stream.abort()
        tokens = sum(len(prompt.ids) for prompt in prompts)
        return Pooled([vectors[number] for number in range(len(prompts))], tokens)

    def options(self, request: Any) -> Options:
        """The request's options."""
        options: Options = request.options
        return options

    def field(self, request: Any, index: int) -> str:
        """The field of the body that a prompt is from."""
        return self.param

    async def tokenise(self, request: Any) -> list[Pair]:
        """Token ids of every prompt, made off the event loop. Raises ApiError."""
        raise NotImplementedError

    def reply(self, request: Any, id: str, pooled: Pooled) -> Reply:
        """The whole reply."""
        return in_json(
            {
                "id": id,
                "model": self.options(request).model,
                **self.full_reply(request, pooled.vectors),
                "usage": pooled.usage,
            }
        )

    def full_reply(self, request: Any, vectors: Sequence[np.ndarray]) -> dict[str, Any]:
        """The members of the reply beside id, model and usage."""
        raise NotImplementedError

    async def encoded(self, encode: Callable[[Tokenizer], list[Pair]]) -> list[Pair]:
        """What `encode` makes with the tokenizer, in a thread. Raises ApiError without one."""
        tokenizer = self._state.tokenizer
        if tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer; send token ids to /v1/embeddings", self.param
            )
        return await self._state.in_thread(encode, tokenizer)


def in_json(members: dict[str, Any]) -> Reply:
    """A reply of these members, arrays among them."""
    return Reply(orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY))


def listing(data: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's list of objects, made now."""
    return {"object": "list", "created": int(time.time()), "data": data}
