"""A thread beside its caller's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from jaxllm.background.thread import BackgroundThread


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Who has Python's lock keeps it until it waits for something, however busy the machine is."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("undisturbed")
def test_work_has_begun_when_begin_returns_and_goes_on_beside_the_caller() -> None:
    beside, seen, go = BackgroundThread("test"), list[str](), threading.Event()

    def work() -> int:
        seen.append(threading.current_thread().name)
        assert go.wait(20)
        return 3

    future = beside.submit(work)
    assert seen and seen[0].startswith("test") and not future.done()
    go.set()
    assert future.result(20) == 3


def test_what_work_raises_reaches_whoever_waits_and_the_thread_goes_on() -> None:
    beside = BackgroundThread("test")
    with pytest.raises(ZeroDivisionError):
        beside.submit(lambda: 1 // 0).result(20)
    assert beside.submit(lambda: 4).result(20) == 4


def test_it_settles_when_its_work_has_ended_also_badly() -> None:
    beside, go = BackgroundThread("test"), threading.Event()
    beside.settle()

    def work() -> None:
        assert go.wait(20)
        raise ZeroDivisionError

    future = beside.submit(work)
    threading.Timer(0.05, go.set).start()
    beside.settle()
    assert isinstance(future.exception(0), ZeroDivisionError)
