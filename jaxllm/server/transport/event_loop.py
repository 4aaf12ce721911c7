"""asyncio's event loop, which turns to a few ready sockets at a time.

A turn runs each step of all that is ready before the next step of any. When many requests arrive at
once, that would be: accept all connections, then read all requests, then parse all, and the engine
would have the first request when it could have nearly all. In turns of a few it starts early.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from typing import Any

SOCKETS = 8  # in a turn


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Where Linux's epoll is missing, asyncio's own."""
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(FewAtATime())


class FewAtATime(selectors.EpollSelector):
    """Linux tells of sockets that stay ready in rotation, so none waits for ever."""

    _selector: Any  # of the standard library; tests hold that it is there

    def __init__(self) -> None:
        super().__init__()
        self._selector = FewEvents(self._selector)


class FewEvents:
    """An epoll object of at most `SOCKETS` events a poll."""

    def __init__(self, epoll: select.epoll):
        self._epoll = epoll

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        """select.epoll"""
        return self._epoll.poll(timeout, min(maxevents, SOCKETS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)
