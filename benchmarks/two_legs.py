"""Requests that one server begins and another continues, as vLLM's routers send them."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from benchmarks.client import FAULTS, Call, asked, call, post, said

PATH = "/v1/completions"
# What routers ask of the first leg
FIRST_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

type Offer = dict[str, Any] | None


class Router:
    """Sends each request to the server that computes prompts, then with its answer to the one that
    continues them. Without an answer the second computes the prompt.

    Attributes:
        legs: seconds of each first leg that was answered.
        faults: of those that were not.
        offered: is set whenever one is answered.
    """

    def __init__(self, prefill: str, decode: str, model: str, output: int):
        self.prefill, self.decode, self.model, self.output = prefill, decode, model, output
        self.legs: list[float] = []
        self.faults: list[str] = []
        self.offered = asyncio.Event()

    async def __call__(self, ids: list[int]) -> Call:
        """Both legs; the times are those of the whole."""
        begin = time.perf_counter()
        done = await self.continued(ids, *await self.offer(ids))
        done.begin = begin
        return done

    async def offer(self, ids: list[int], tokens: int = 1) -> tuple[Offer, str]:
        """The first leg: what its answer tells the second, None where there was no answer, and the
        request's id. Who asks for more than one of its `tokens` is answered when all pages are
        computed."""
        begin, id = time.perf_counter(), secrets.token_hex(8)
        more = {"max_tokens": tokens, "min_tokens": tokens, "kv_transfer_params": FIRST_LEG}
        try:
            answer = await post(
                self.prefill + PATH, asked(self.model, ids, 1) | more, {"x-request-id": id}
            )
            offer: Offer = answer["kv_transfer_params"]
        except FAULTS as error:
            self.faults.append(said(error))
            return None, id
        self.legs.append(time.perf_counter() - begin)
        self.offered.set()
        return offer, id

    async def continued(self, ids: list[int], offer: Offer, id: str) -> Call:
        """The second leg, streamed."""
        more = {} if offer is None else {"kv_transfer_params": offer}
        body = asked(self.model, ids, self.output) | more
        return await call(self.decode + PATH, body, {"x-request-id": id})
