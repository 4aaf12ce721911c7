"""Parts of a start that run at once: what becomes of the others when one fails."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from jaxllm.engine.startup.together import Together, shares

PATIENCE = 30  # seconds, which nothing here takes unless it fails


def test_the_first_part_that_fails_stops_the_others_and_its_error_is_the_blocks() -> None:
    failed, ended = threading.Event(), list[str]()

    def fails() -> None:
        raise ValueError("the first")

    def works(name: str, together: Together) -> None:
        progress = together.watched(lambda done, total: None)
        assert failed.wait(PATIENCE)
        try:
            progress(1, 2)
        finally:
            ended.append(name)

    def block() -> None:
        with Together(2) as together:
            together.begin(lambda: works("thread", together))
            assert isinstance(together.begin(fails).exception(PATIENCE), ValueError)
            failed.set()
            works("block", together)

    with pytest.raises(ValueError, match="the first"):
        block()
    assert sorted(ended) == ["block", "thread"]


def test_a_block_that_fails_stops_its_parts_and_waits_for_them() -> None:
    begun, parts = threading.Event(), list[Future[None]]()

    def works(together: Together) -> None:
        progress = together.watched(lambda done, total: begun.set())
        while True:
            progress(1, 2)

    def block() -> None:
        with Together(1) as together:
            parts.append(together.begin(lambda: works(together)))
            assert begun.wait(PATIENCE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert parts[0].done()


def test_parts_that_all_end_well_give_their_results() -> None:
    with Together(2) as together:
        parts = [together.begin(lambda number=number: number + 1) for number in range(2)]
        assert [part.result(PATIENCE) for part in parts] == [1, 2]


def test_the_progress_of_several_parts_is_their_sum() -> None:
    told = list[tuple[int, int]]()
    one, other = shares(lambda *given: told.append(given), 2)
    one(1, 4)
    other(2, 6)
    one(4, 4)
    assert told == [(1, 4), (3, 10), (6, 10)]
