"""Threads that hold no process which ends."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from typing import Any

from jaxllm.background.daemons import DaemonThreads

WAITS = """
import threading
from jaxllm.background.daemons import DaemonThreads
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
threads = DaemonThreads(2, "test")
threads.submit(hang)
begun.wait()
print("ends")
"""


def test_results_and_errors_come_back_and_threads_are_few() -> None:
    threads, names = DaemonThreads(3, "test"), set[str]()
    together = threading.Barrier(3)

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        together.wait(20)
        return 12 // number

    futures = [threads.submit(work, number) for number in (1, 2, 3, 0, 4, 5)]
    wait(futures, 20)
    assert [f.result() for f in futures if f.exception() is None] == [12, 6, 4, 3, 2]
    assert isinstance(futures[3].exception(), ZeroDivisionError)
    assert names == {"test-0", "test-1", "test-2"}
    threads.close(20)
    assert not any(thread.name in names for thread in threading.enumerate())


def test_a_thread_is_used_again() -> None:
    threads = DaemonThreads(3, "test")
    for number in range(5):
        assert threads.submit(lambda: number).result(20) == number  # noqa: B023
    assert len(threads._threads) == 1
    threads.close(20)


def test_what_has_not_begun_is_cancelled_and_what_has_is_waited_for_so_long() -> None:
    threads, begun, go = DaemonThreads(1, "test"), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go.wait(20)

    first, second = threads.submit(hang), threads.submit(hang)
    assert begun.wait(20)
    threads.close(0.01)
    assert not first.done()
    assert wait([second], 20).done == {second} and second.cancelled()
    assert threads.submit(hang).cancelled()
    go.set()
    assert first.result(20)


def test_a_job_may_be_taken_while_they_are_closed() -> None:
    class Taken:
        """A queue whose last job another thread takes just after it was seen."""

        def empty(self) -> bool:
            return False

        def get(self) -> Any:
            raise AssertionError("this would wait for ever")

        def get_nowait(self) -> Any:
            raise queue.Empty

    threads = DaemonThreads(1, "test")
    threads._jobs = Taken()  # type: ignore[assignment]
    threads.close(20)
    assert threads.submit(int).cancelled()


def test_who_hears_that_a_job_is_cancelled_may_call_them() -> None:
    threads, begun, go = DaemonThreads(1, "test"), threading.Event(), threading.Event()
    heard = list[Future[int]]()
    threads.submit(lambda: begun.set() or go.wait(20))
    assert begun.wait(20)
    threads.submit(int).add_done_callback(lambda _: heard.append(threads.submit(int)))
    closing = threading.Thread(target=threads.close, args=(0.01,), daemon=True)
    closing.start()
    closing.join(20)
    go.set()
    assert not closing.is_alive() and [each.cancelled() for each in heard] == [True]


def test_a_process_ends_while_they_wait() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ends\n", b"")
