"""A thread for one piece of work at a time, beside the thread that started it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any


class BackgroundThread:
    """Runs one function at a time, for work that spends its time in native code."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[Any] | None = None

    def submit[T](self, work: Callable[[], T]) -> Future[T]:
        """Queue `work` and return when it runs.

        Waiting hands the interpreter's lock over at once. Otherwise `work` might wait 5 ms for it
        while the caller runs Python.
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
        """Wait until all work has ended, with a result or an error. An interrupt may have cut an
        earlier wait short."""
        if self._last is not None and not self._last.done():
            wait([self._last])
