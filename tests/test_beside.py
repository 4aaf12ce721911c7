"""A thread beside its caller's."""

from __future__ import annotations

import threading

import pytest

from jaxllm.beside import Beside


def test_work_has_begun_when_begin_returns_and_goes_on_beside_the_caller() -> None:
    beside, seen, go = Beside("test"), list[str](), threading.Event()

    def work() -> int:
        seen.append(threading.current_thread().name)
        assert go.wait(20)
        return 3

    future = beside.begin(work)
    assert seen and seen[0].startswith("test") and not future.done()
    go.set()
    assert future.result(20) == 3


def test_what_work_raises_reaches_whoever_waits_and_the_thread_goes_on() -> None:
    beside = Beside("test")
    with pytest.raises(ZeroDivisionError):
        beside.begin(lambda: 1 // 0).result(20)
    assert beside.begin(lambda: 4).result(20) == 4
