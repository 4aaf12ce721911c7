"""Requests that arrive together reach the engine one after the other, not when all are read."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.errors import ApiError
from jaxllm.server.transport.event_loop import SOCKETS, FewAtATime
from jaxllm.server.transport.gone import ClientGone, unless_gone
from jaxllm.server.transport.http import HttpProtocol
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

COUNT = 4 * SOCKETS
BODY = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True}


def test_the_engine_has_the_first_of_many_requests_before_the_last_connection_is_accepted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def noting(*args: Any) -> Any:
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, noting)

    config = EngineConfig(model="fake", max_num_queued_reqs=COUNT)
    with Running(tokenizer, config=config) as running, contextlib.ExitStack() as stack:
        noted(HttpProtocol, "connection_made")
        noted(EngineClient, "take")
        held, free = threading.Event(), threading.Event()
        running.loop.call_soon_threadsafe(lambda: (held.set(), free.wait(60)))
        assert held.wait(60)
        calls = [stack.enter_context(running.begin("/v1/completions", BODY)) for _ in range(COUNT)]
        free.set()
        for call in calls:
            assert call.status() == 200
    assert seen.count("connection_made") == seen.count("take") == COUNT
    assert "connection_made" in seen[seen.index("take") :]


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_sockets_that_stay_ready_have_turns() -> None:
    with contextlib.ExitStack() as stack, FewAtATime() as selector:
        for number in range(COUNT):
            here, there = map(stack.enter_context, socket.socketpair())
            there.send(b".")
            selector.register(here, selectors.EVENT_READ, number)
        turns = [[key.data for key, _ in selector.select(0)] for _ in range(COUNT // SOCKETS)]
    assert all(len(turn) <= SOCKETS for turn in turns)
    assert {number for turn in turns for number in turn} == set(range(COUNT))


def test_work_that_never_waits_is_done_at_once() -> None:
    async def answered() -> int:
        return 42

    async def refused() -> int:
        raise ApiError(400, "no")

    async def turns() -> int:
        """Turns of the event loop until the result is there."""
        count = 0

        def turn() -> None:
            nonlocal count
            count += 1
            asyncio.get_running_loop().call_soon(turn)

        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn)
        assert await unless_gone(gone, answered()) == 42
        with pytest.raises(ApiError, match="no"):
            await unless_gone(gone, refused())
        return count

    assert asyncio.run(turns()) == 0


def test_work_that_waits_ends_when_its_client_goes() -> None:
    async def gone_first() -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(gone.set_result, None)
        with pytest.raises(ClientGone):
            await unless_gone(gone, asyncio.sleep(60))

    asyncio.run(gone_first())
