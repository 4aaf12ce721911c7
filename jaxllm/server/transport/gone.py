"""Noticing that a client has gone, and that nobody would read what is still done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from jaxllm.server.errors import ApiError


class ClientGone(ApiError):
    """The client closed the connection, so a reply would not be read."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_gone")


async def until_gone(receive: Any) -> None:
    """Wait until the client closes the connection; to be used once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone[T](gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes first. Raises ClientGone."""
    task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    if task.done():
        return task.result()
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        task.cancel()
        await asyncio.wait((task,))
