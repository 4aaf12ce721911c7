"""Threads for work that may wait for other machines: a process that ends does not wait for them."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

type _Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads:
    """At most `count` threads, each started when there is work for it. Any thread may call it.

    A process that ends joins the threads of `concurrent.futures` before anybody can tell them to
    stop; it does not join these.
    """

    def __init__(self, count: int, name: str):
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0  # jobs
        self._closed = False

    def submit[**P, T](
        self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> Future[T]:
        """Call `work` in one of the threads; after `close` it is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if not self._closed:
                self._jobs.put((future, functools.partial(work, *arguments, **named)))
                self._unfinished += 1
                if len(self._threads) < min(self._count, self._unfinished):
                    name = f"{self._name}-{len(self._threads)}"
                    self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                    self._threads[-1].start()
                return future
        cancel(future)
        return future

    def close(self, seconds: float) -> None:
        """Cancel what has not begun, and wait at most so long for what has."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            waiting = self._taken()
            for _ in self._threads:
                self._jobs.put(None)
        for future in waiting:  # whose callbacks may call this object
            cancel(future)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _taken(self) -> list[Future[Any]]:
        """The jobs that no thread has taken, which take jobs meanwhile."""
        futures = []
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    futures.append(job[0])
        return futures

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for a job and do it; nothing of it is held afterwards. False at the end."""
        if (job := self._jobs.get()) is None:
            return False
        future, work = job
        result = None
        error = None
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as raised:
                error = raised
        with self._lock:
            self._unfinished -= 1
        if error is not None:
            future.set_exception(error)
        elif not future.cancelled():
            future.set_result(result)
        return True


def cancel(future: Future[Any]) -> None:
    """Cancel what has not begun, and tell who waits for it."""
    future.cancel()
    future.set_running_or_notify_cancel()
