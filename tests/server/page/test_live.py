"""The stream of statistics: who may watch, what a frame holds, and that nobody pays otherwise."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from jaxllm.server.metrics import Histogram
from jaxllm.server.page import live
from jaxllm.server.recorder import SAMPLES, WINDOW, LatencyWindow, bucket, quantile
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Open, Running, with_settings

WATCH = b"GET /stats/stream HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames as fast as a test reads them, nearly."""
    monkeypatch.setattr(live, "PERIOD", 0.02)


def skip_head(watcher: Open) -> None:
    while watcher.line().strip():
        pass


def event(watcher: Open) -> tuple[str, dict[str, Any]]:
    """The next event: its name, "" for a frame, and its data."""
    name = ""
    while not (line := watcher.line()).startswith(b"data: "):
        assert line
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
    return name, json.loads(line[6:])


def frame(watcher: Open) -> dict[str, Any]:
    """The next frame."""
    while True:
        name, data = event(watcher)
        if not name:
            return data


def producers(running: Running) -> int:
    """How many tasks of the server make frames, counted on its own thread."""
    import asyncio

    async def count() -> int:
        return sum("_produce" in repr(task) for task in asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), running.loop).result(60)


def test_a_frame_holds_counts_and_no_text(fresh: Running) -> None:
    secret = "a text that nobody else may see"
    fresh.post("/v1/completions", {"model": "fake", "prompt": secret, "max_tokens": 8})
    with fresh.begin_raw(WATCH) as watcher:
        skip_head(watcher)
        while "step_totals" not in (found := frame(watcher)):
            pass  # the engine looks at itself once it is watched
    assert (found["prompt_tokens"], found["generation_tokens"]) == (len(secret), 8)
    assert found["ttft"]["count"] == 1
    assert found["itl"]["count"] == 7
    assert found["step_totals"]["decode"]["steps"] == 8
    assert found["pools"][0] | {"cells": ""} == {
        "pages": 64,
        "page_size": 16,
        "window": None,
        "held": 0,
        "cached": 0,
        "per_cell": 1,
        "cells": "",
    }
    assert found["pools"][0]["cells"] == "000" * 64
    texts = {value for value in found.values() if isinstance(value, str)}
    assert all(re.fullmatch(r"fake|[\d.]+\w*", text) for text in texts)
    assert secret not in json.dumps(found)


def test_frames_are_made_only_while_somebody_watches_and_once_for_all(fresh: Running) -> None:
    assert producers(fresh) == 0
    watchers = [fresh.begin_raw(WATCH) for _ in range(3)]
    for watcher in watchers:
        skip_head(watcher)
        frame(watcher)
    assert producers(fresh) == 1
    for watcher in watchers:
        watcher.close()
    until(lambda: producers(fresh) == 0)


def until(condition: Any) -> None:
    """Ask until it is so; the test's own time limit ends it."""
    while not condition():
        pass


def test_the_number_of_watchers_is_bounded(fresh: Running) -> None:
    watchers = [fresh.begin_raw(WATCH) for _ in range(live.MAX_LISTENERS)]
    for watcher in watchers:
        assert watcher.status() == 200
    refused = fresh.get("/stats/stream")
    assert (refused.status, refused.error["code"]) == (503, "stats_full")
    for watcher in watchers:
        watcher.close()


def test_head_asks_for_no_frames(fresh: Running) -> None:
    answer = fresh.request("HEAD", "/stats/stream")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert producers(fresh) == 0


def test_a_step_that_takes_long_leaves_frames_without_the_engines_part(fresh: Running) -> None:
    fresh.control.go.clear()
    asking = threading.Thread(
        target=fresh.post, args=("/v1/completions", {"model": "fake", "prompt": "abc"})
    )
    asking.start()
    assert fresh.control.saw(lambda: bool(fresh.control.added))
    with fresh.begin_raw(WATCH) as watcher:
        skip_head(watcher)
        assert "pools" not in frame(watcher)
        fresh.control.go.set()
        while "pools" not in frame(watcher):
            pass
    asking.join(60)


def test_watchers_do_not_delay_the_end_of_the_server(tokenizer: Tokenizer) -> None:
    last = WATCH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with Running(tokenizer) as running, running.begin_raw(last) as watcher:
        skip_head(watcher)
        frame(watcher)
        running.server_state.draining = True
        assert watcher.rest().endswith(b"0\r\n\r\n")  # the last chunk of a whole reply


def test_the_stream_needs_a_key_where_there_are_keys(tokenizer: Tokenizer) -> None:
    with Running(tokenizer, with_settings(api_keys=("secret",))) as running:
        assert running.get("/stats/stream").error["code"] == "invalid_api_key"
        key = WATCH.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer secret\r\n\r\n")
        with running.begin_raw(key) as watcher:
            skip_head(watcher)
            assert frame(watcher)["alive"] is True


def test_quantiles_are_interpolated_in_their_bucket() -> None:
    bounds, counts = (1.0, 2.0, 4.0), [2, 0, 2, 0]
    assert quantile(bounds, counts, 0.5) == 1.0
    assert quantile(bounds, counts, 0.75) == 3.0
    assert quantile(bounds, counts, 1.0) == 4.0
    assert quantile(bounds, [0, 0, 0, 5], 0.5) == 4.0
    assert quantile(bounds, [0] * 4, 0.5) is None


def test_latencies_are_those_of_the_window_while_it_has_any() -> None:
    histogram = Histogram("seconds", (1.0, 2.0, 4.0))
    histogram.observe(3.5)
    window = LatencyWindow([histogram])
    window.advance()
    assert window.summary()["recent"] is False
    assert window.summary()["mean"] == 3.5
    histogram.observe(0.5, 3)
    summary = window.summary()
    assert (summary["recent"], summary["count"], summary["mean"]) == (True, 3, 0.5)
    assert summary["between"]["p50"] == (0.0, 1.0)
    for _ in range(WINDOW):
        window.advance()
    summary = window.summary()
    assert (summary["recent"], summary["count"]) == (False, 4)


def test_a_percentile_is_known_to_lie_in_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert bucket(bounds, [2, 0, 2, 0], 0.5) == (0.0, 1.0)
    assert bucket(bounds, [2, 0, 2, 0], 0.75) == (2.0, 4.0)
    assert bucket(bounds, [0, 0, 0, 5], 0.5) == (4.0, None)
    assert bucket(bounds, [0] * 4, 0.5) is None


def test_a_watcher_is_told_first_what_was_before_it_came(fresh: Running) -> None:
    for _ in range(3):
        fresh.server_state.recorder.sample()
    fresh.post("/v1/completions", {"model": "fake", "prompt": "abc", "max_tokens": 8})
    fresh.server_state.recorder.sample()
    with fresh.begin_raw(WATCH) as watcher:
        skip_head(watcher)
        name, columns = event(watcher)
    assert name == "history"
    assert {len(column) for column in columns.values()} == {4}
    assert columns["generation_tokens"] == [0, 0, 0, 3]
    assert columns["running"][-1] == 0
    assert columns["time"] == sorted(columns["time"])


def test_samples_are_bounded(fresh: Running) -> None:
    for _ in range(SAMPLES + 10):
        fresh.server_state.recorder.sample()
    assert len(fresh.server_state.recorder.columns()["steps"]) == SAMPLES
