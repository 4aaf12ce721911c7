"""Parts of a start that run side by side in threads and fail as one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

from jaxllm.engine.runtime.lattice import Progress


class Stopped(Exception):
    """Another part has failed; `Together` raises that part's error instead."""


class Together(AbstractContextManager["Together"]):
    """Parts in threads, beside the one of the `with` block.

    The first that fails stops the others at their next `watched` progress. The block ends when all
    have ended, with the error of that first one.
    """

    def __init__(self, parts: int):
        self._pool = ThreadPoolExecutor(parts, thread_name_prefix="start")
        self._lock = threading.Lock()
        self._failed: BaseException | None = None

    def begin[T](self, part: Callable[[], T]) -> Future[T]:
        """Run a part in a thread of its own."""
        return self._pool.submit(self._run, part)

    def watched(self, progress: Progress) -> Progress:
        """`progress` that raises Stopped once a part has failed."""

        def tell(done: int, total: int) -> None:
            if self._failed is not None:
                raise Stopped
            progress(done, total)

        return tell

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        self._pool.shutdown()
        if self._failed is not None and self._failed is not error:
            raise self._failed

    def _run[T](self, part: Callable[[], T]) -> T:
        try:
            return part()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed = self._failed or error


def shares(progress: Progress, count: int) -> list[Progress]:
    """One progress for each of so many parts that run at once; `progress` is told their sums."""
    told = [(0, 0)] * count
    lock = threading.Lock()

    def share(part: int) -> Progress:
        def tell(done: int, total: int) -> None:
            with lock:
                told[part] = done, total
                progress(sum(done for done, _ in told), sum(total for _, total in told))

        return tell

    return [share(part) for part in range(count)]
