"""The compiler's process may be killed or ended at any time; callers get a clean error."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from jaxllm.background import process as module
from jaxllm.background.process import JobProcess
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import CompilerLost, StructuredOutputsParams, StructureError
from tests.grammar.test_checker import SPECIALS, bomb, why


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(SPECIALS)
    yield checker
    checker.end_processes()


def under_way(
    checker: Checker, **given: Any
) -> tuple[threading.Thread, list[StructureError], psutil.Process]:
    """A check in a thread, its result, and the fork that does it."""
    found: list[StructureError] = []

    def check() -> None:
        with pytest.raises(StructureError) as error:
            checker.compile_params(StructuredOutputsParams(**given))
        found.append(error.value)

    checking = threading.Thread(target=check)
    checking.start()
    forks: list[psutil.Process] = []
    while not forks:
        assert checking.is_alive()
        process = checker._compilers[-1]._process
        forks = psutil.Process(process.pid).children() if process is not None else []
    return checking, found, forks[0]


def test_a_grammar_whose_compilation_somebody_else_killed_is_not_at_fault() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    fork.kill()  # as the kernel does on a machine without memory
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "killed" in str(found[0])
    assert not own._kept, "it may be tried again"
    assert own._compilers[-1]._process is not None
    compiler = own._compilers[-1]._process.pid
    assert "too much time" in why(own, json=bomb(24)) and own._kept, (
        "which its own limit ends for good"
    )
    assert own._compilers[-1]._process.pid == compiler, "nothing starts again"
    own.end_processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_service_managers_send_to_every_process_ends_no_compilation(number: int) -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    process = own._compilers[-1]._process
    assert process is not None
    for one in (process, fork):
        one.send_signal(number)
    checking.join(20)
    assert "too much time" in str(found[0])
    assert own._compilers[-1]._process is process
    own.end_processes()


def test_a_compiler_that_ends_while_it_is_asked_is_not_the_fault_of_the_grammar() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    assert own._compilers[-1]._process is not None
    own._compilers[-1]._process.kill()
    fork.kill()
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "ended" in str(found[0]) and not own._kept
    assert own.compile_params(StructuredOutputsParams(regex="a"))
    own.end_processes()


def test_a_compiler_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"))
    silent._compilers[-1]._running()
    monkeypatch.setattr(silent._compilers[-1], "wall_seconds", 0.05)
    assert "too much time" in why(silent, regex="a")
    assert silent._compilers[-1]._process is None
    assert not silent._kept, "on another day it may be in time"


def test_closing_ends_a_check_that_is_under_way() -> None:
    silent, found = (
        Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()")),
        [],
    )
    silent._compilers[-1]._running()
    checking = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
    checking.start()
    while not silent._compilers[-1]._lock.locked():
        assert checking.is_alive()
    start = time.monotonic()
    silent.end_processes()
    checking.join(20)
    assert time.monotonic() - start < JobProcess.wall_seconds / 2
    assert len(found) == 1 and silent._compilers[-1]._process is None
    assert "closed" in found[0] and not silent._kept, "no fault of the grammar"


def test_a_process_that_begins_after_the_closing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"))
    real = silent._compilers[-1]._running

    def running() -> subprocess.Popen[bytes]:
        closing.start()  # there is no process to end, and it waits for this check
        while not silent._compilers[-1]._closings:
            assert closing.is_alive()
        return real()

    closing = threading.Thread(target=silent.end_processes)
    monkeypatch.setattr(silent._compilers[-1], "_running", running)
    start = time.monotonic()
    assert "closed" in why(silent, regex="a")
    closing.join(20)
    assert time.monotonic() - start < JobProcess.wall_seconds / 2
    assert silent._compilers[-1]._process is None


def test_a_check_that_begins_as_the_process_is_being_ended_keeps_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, found = (
        Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()")),
        [],
    )
    process, real, read, taken = (
        silent._compilers[-1]._running(),
        module.kill,
        module.read_line,
        threading.Event(),
    )

    def kill(one: subprocess.Popen[bytes]) -> None:
        if one is process and not checking.ident:
            # After the closing has been counted, and it gets the process that is about to end
            checking.start()
            assert taken.wait(20)
        real(one)

    def line(process: subprocess.Popen[bytes], deadline: float, limit: int) -> bytes:
        taken.set()
        return read(process, deadline, limit)

    checking = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
    monkeypatch.setattr(module, "kill", kill)
    monkeypatch.setattr(module, "read_line", line)
    silent.end_processes()
    checking.join(20)
    assert "closed" in found[0] and not silent._kept


def test_checks_that_waited_for_a_closing_start_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, found = (
        Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()")),
        [],
    )
    lock, asked = silent._compilers[-1]._lock, threading.Event()

    class Asked:
        """The lock, which tells when it is asked for."""

        def __enter__(self) -> None:
            asked.set()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(silent._compilers[-1], "_lock", Asked())
    with lock:
        waiting = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
        waiting.start()
        assert asked.wait(20)
        silent._compilers[-1]._closings += 1
    waiting.join(20)
    assert "closed" in found[0] and silent._compilers[-1]._process is None


def test_a_grammar_whose_check_was_closed_compiles_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Checker(SPECIALS)
    own.compile_params(StructuredOutputsParams(regex="a"))
    process = own._compilers[-1]._process
    assert process is not None
    # So that the check is under way for as long as the test wants
    process.send_signal(signal.SIGSTOP)
    asked, real, found = threading.Event(), module.read_line, []

    def line(process: subprocess.Popen[bytes], deadline: float, limit: int) -> bytes:
        asked.set()
        return real(process, deadline, limit)

    monkeypatch.setattr(module, "read_line", line)
    checking = threading.Thread(target=lambda: found.append(why(own, regex="[ab]{4}")))
    checking.start()
    assert asked.wait(20)
    own.end_processes()
    checking.join(20)
    assert len(found) == 1 and "closed" in found[0]
    assert own.compile_params(StructuredOutputsParams(regex="[ab]{4}"))
    own.end_processes()


def test_a_compiler_that_cannot_start_is_reported() -> None:
    for command in (("/nonexistent",), (sys.executable, "-c", "pass")):
        checker = Checker({}, command)
        assert "cannot be started" in why(checker, regex="a")
        assert not checker._kept


def test_closing_ends_the_fork_that_does_a_job() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    own.end_processes()
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "closed" in str(found[0])
    psutil.wait_procs([fork], 20)
    assert not fork.is_running()
