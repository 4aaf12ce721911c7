"""How far a start is: words of its phases, and lines while it lasts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from jaxllm.engine.startup.report import Report
from jaxllm.server.engine import loading, progress
from jaxllm.server.engine.loading import heard
from jaxllm.server.engine.progress import BEGUN, StartProgress, said
from jaxllm.server.engine.wire import Phase


def test_phases_that_run_are_said_with_their_counts_in_the_order_of_their_begins() -> None:
    start = StartProgress()
    assert (start.text, start.running) == (BEGUN, False)
    said_then = []
    for phase in (
        Phase("Loading weights", None),
        Phase("Compiling", None),
        Phase("Compiling", None, 12, 36),
        Phase("Loading weights", None, 1 << 29, 1 << 30),
        Phase("Loading weights", 3.5),
        Phase("Compiling", None, 36, 36),
        Phase("Compiling", 9.5),
        Phase("Warming up", None, 1, 2),
        Phase("Never begun", 1.0),
        Phase("Warming up", 1.0),
    ):
        start.hear(phase)
        said_then.append(start.text)
    assert said_then == [
        "loading weights",
        "loading weights, compiling",
        "loading weights, compiled 12 of 36 programs",
        "loaded 0.50 GiB of 1.00 GiB of weights, compiled 12 of 36 programs",
        "compiled 12 of 36 programs",
        *["compiled 36 of 36 programs"] * 2,
        *["warming up, 1 of 2"] * 3,
    ]
    assert not start.running


def test_a_start_is_said_to_the_log_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "SAID_SECONDS", 0.001)

    async def main() -> int:
        async with said(None, lambda: "nobody asked"), said("loading m", lambda: "so far"):
            while len(caplog.messages) < 3:
                await asyncio.sleep(0)
        count = len(caplog.messages)
        await asyncio.sleep(0.02)
        return len(caplog.messages) - count

    with caplog.at_level(logging.INFO, "jaxllm.server"):
        assert asyncio.run(main()) == 0
    assert set(caplog.messages) == {"loading m: so far, 0 s so far"}


def test_a_report_tells_of_begins_ends_and_of_what_is_new_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    now = [0.0]
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    report = heard(Report, lambda *phase: told.append(phase))
    with report.phase("Compiling") as moved:
        for done in range(1, 101):
            now[0] += 0.01
            moved(done, 100)
    assert told[0] == ("Compiling", None, 0, 0) and told[-2] == ("Compiling", None, 100, 100)
    assert told[-1][0] == "Compiling" and told[-1][1] == report.seconds["Compiling"]
    assert 6 <= len(told) <= 9, "not one message for each program"
