"""Requests that wait for grammars: the queue is bounded, and slow ones hold up nobody else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.grammar.checker import Job
from jaxllm.grammar.limits import BUDGETS
from jaxllm.server import grammar_queue as module
from tests.server.harness import Running


class Slow:
    """A compiler that takes as long as the test wants."""

    def __init__(self) -> None:
        self.begun: list[str] = []  # in the last lane
        self.lanes: list[int] = []
        self.kept: dict[bytes, str] = {}
        self.changed = threading.Condition()
        self.go = threading.Event()
        self.closed = threading.Event()

    def cached_grammar(self, job: Job) -> str | None:
        return self.kept.get(job.key)

    def compile_within(self, job: Job, lane: int) -> str | None:
        self.lanes.append(lane)
        if lane < len(BUDGETS) - 1:
            return "start: /x/" if json.loads(job.line)["value"].startswith("quick") else None
        with self.changed:
            self.begun.append(json.loads(job.line)["value"])
            self.changed.notify_all()
        assert self.go.wait(20)
        self.kept[job.key] = "start: /x/"
        return self.kept[job.key]

    def end_processes(self) -> None:
        assert self.go.wait(20)
        self.closed.set()

    def began(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) >= count, 20)


def asking(name: str) -> dict[str, Any]:
    return {"model": "fake", "prompt": "abc", "guided_regex": name}


@pytest.fixture
def slow(fresh: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """In the place of the compiler of `fresh`."""
    slow = Slow()
    with monkeypatch.context() as patch:
        patch.setattr(fresh.server_state.grammars, "_checker", slow)
        patch.setattr(module, "MAX_GRAMMARS", 3)
        yield slow


def waiting(server: Running) -> list[int]:
    """How many requests wait for each grammar under way."""
    assert server.get("/version").status == 200  # what came before has been taken
    assert server.server_state.grammars is not None
    return [one.waiting for one in server.server_state.grammars._compiling.values()]


def test_a_full_queue_of_grammars_is_a_503_and_those_of_clients_that_have_gone_are_not_compiled(
    fresh: Running, slow: Slow
) -> None:
    with fresh.begin("/v1/completions", asking("first")) as first:
        assert slow.began(1)
        with (
            fresh.begin("/v1/completions", asking("second")),
            fresh.begin("/v1/completions", asking("third")),
        ):
            while len(waiting(fresh)) < 3:
                pass
            refused = fresh.post("/v1/completions", asking("fourth"))
            assert (refused.status, refused.error["code"]) == (503, "grammar_queue_full")
            assert "3 grammars wait" in refused.error["message"] and refused.headers["retry-after"]
            assert (
                fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"}).status == 200
            ), "who asks for no grammar is not held up"
        while fresh.server_state.active > 1:
            assert fresh.get("/version").status == 200
        assert waiting(fresh) == [1]
        slow.go.set()
        assert first.status() == 200
    assert fresh.post("/v1/completions", asking("last")).status == 200
    assert slow.begun == ["first", "last"]
    refusals = (
        b'vllm:admission_rejections_total{engine="0",model_name="fake",'
        b'reason="grammar_queue_full"} 1.0'
    )
    assert refusals in fresh.get("/metrics").body
    assert fresh.server_state.active == 0 and waiting(fresh) == []


def test_requests_of_one_grammar_wait_for_one_compilation_and_later_ones_not_at_all(
    fresh: Running, slow: Slow
) -> None:
    body, statuses = asking("same"), []
    clients = [
        threading.Thread(target=lambda: statuses.append(fresh.post("/v1/completions", body).status))
        for _ in range(10)
    ]
    for client in clients:
        client.start()
    while waiting(fresh) != [10]:
        pass
    slow.go.set()
    for client in clients:
        client.join(20)
    assert statuses == [200] * 10 and slow.begun == ["same"]
    slow.go.clear()
    with fresh.begin("/v1/completions", asking("a")), fresh.begin("/v1/completions", asking("b")):
        with fresh.begin("/v1/completions", asking("c")):
            while len(waiting(fresh)) < 3:
                pass
            assert fresh.post("/v1/completions", body).status == 200, (
                "what is known waits in no queue"
            )
            assert fresh.post("/v1/completions", asking("d")).status == 503
        slow.go.set()


def test_quick_grammars_do_not_wait_for_slow_ones(fresh: Running, slow: Slow) -> None:
    with (
        fresh.begin("/v1/completions", asking("first")) as first,
        fresh.begin("/v1/completions", asking("second")) as second,
    ):
        assert slow.began(1)
        assert fresh.post("/v1/completions", asking("quick")).status == 200
        assert slow.begun == ["first"]
        while sorted(slow.lanes) != [0, 0, 0, 1, 1, 2]:  # the second waits for the last lane
            assert fresh.get("/version").status == 200
        slow.go.set()
        assert (first.status(), second.status()) == (200, 200)


def test_a_client_that_goes_takes_the_grammar_of_others_with_it_only_as_the_last(
    fresh: Running, slow: Slow
) -> None:
    with fresh.begin("/v1/completions", asking("first")) as first:
        assert slow.began(1)
        with fresh.begin("/v1/completions", asking("second")) as stays:
            while waiting(fresh) != [1, 1]:
                pass
            with (
                fresh.begin("/v1/completions", asking("second")),
                fresh.begin("/v1/completions", asking("third")),
            ):
                while waiting(fresh) != [1, 2, 1]:
                    pass
            while waiting(fresh) != [1, 1]:
                pass
            # Turns of the loop later: the thread's queue has heard of it, too
            assert waiting(fresh) == [1, 1]
            slow.go.set()
            assert (first.status(), stays.status()) == (200, 200)
    assert fresh.post("/v1/completions", asking("last")).status == 200
    assert slow.begun == ["first", "second", "last"]


def test_closing_waits_for_no_grammar_on_the_event_loop(fresh: Running, slow: Slow) -> None:
    closing = asyncio.run_coroutine_threadsafe(fresh.server_state.shut_down(), fresh.loop)
    assert fresh.get("/version").status == 200, "the loop goes on"
    assert not closing.done()
    slow.go.set()
    closing.result(20)
    assert slow.closed.is_set()
