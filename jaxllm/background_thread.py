"""A thread beside its caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any


class BackgroundThread:
    """Does one thing at a time in a thread of its own, for work that spends its time in native
    code."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[Any] | None = None

    def begin[T](self, work: Callable[[], T]) -> Future[T]:
        """Start `work` and return when it runs, after the work before. Python's lock is its own
        until it enters native code: it might wait 5 ms for it otherwise, while the caller goes on
        in Python.
        """
        entered = Lock()
        entered.acquire()

        def run() -> T:
            entered.release()
            return work()

        self._last = future = self._thread.submit(run)
        entered.acquire()
        return future

    def settle(self) -> None:
        """Wait until all work has ended, whatever became of it; who waited for it before may have
        been interrupted."""
        if self._last is not None and not self._last.done():
            wait([self._last])
