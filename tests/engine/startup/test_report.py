"""Phases of a start, reported from several threads."""

from __future__ import annotations

import errno
import io
import sys
import threading

import pytest

from jaxllm.engine.startup.report import ConsoleReport, Report


class Overlapping(Report):
    """While its first phase is being reported, a thread ends another one."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.other = threading.Thread(target=self._phase, args=("other",))

    def _phase(self, name: str) -> None:
        with self.phase(name):
            pass

    def phase_finished(self, name: str, seconds: float) -> None:
        if not self.order:
            self.other.start()
            self.other.join(0.2)  # in vain: the report of the first phase is not over
        self.order.append(name)


def test_phases_that_end_in_several_threads_are_reported_one_at_a_time() -> None:
    report = Overlapping()
    with report.phase("first"):
        pass
    report.other.join()
    assert report.order == ["first", "other"]
    assert report.seconds.keys() == {"first", "other"}


def test_a_phase_that_fails_is_not_reported() -> None:
    report = Report()
    try:
        with report.phase("Loading"):
            raise OSError
    except OSError:
        pass
    assert report.seconds == {}


class FullDisk(io.StringIO):
    """A log file that takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    report = ConsoleReport()
    with report.phase("Loading"):
        pass
    report.show_table("decisions", [("device", "cpu")])
    assert report.seconds.keys() == {"Loading"}
