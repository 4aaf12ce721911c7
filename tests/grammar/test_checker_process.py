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
from jaxllm.grammar.checker import Checker, job_of
from jaxllm.grammar.structure import CompilerLost, StructuredOutputsParams, StructureError
from tests.grammar.test_checker import SPECIALS, bomb, compiler_of, why


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
        pid = checker.compilers[-1].pid
        forks = [] if pid is None else psutil.Process(pid).children()
    return checking, found, forks[0]


def is_kept(checker: Checker, **given: Any) -> bool:
    """Whether there is a verdict on a grammar."""
    try:
        return checker.cached_grammar(job_of(StructuredOutputsParams(**given))) is not None
    except StructureError:
        return True


def silent_checker() -> Checker:
    """One whose processes answer no job."""
    return Checker({}, (sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"))


def heard(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when an answer is waited for."""
    real, asked = module.read_line, threading.Event()

    def line(process: subprocess.Popen[bytes], deadline: float, limit: int) -> bytes:
        asked.set()
        return real(process, deadline, limit)

    monkeypatch.setattr(module, "read_line", line)
    return asked


def test_a_grammar_whose_compilation_somebody_else_killed_is_not_at_fault() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    fork.kill()  # as the kernel does on a machine without memory
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "killed" in str(found[0])
    assert not is_kept(own, json=bomb(24)), "it may be tried again"
    compiler = compiler_of(own)
    assert "too much time" in why(own, json=bomb(24))
    assert is_kept(own, json=bomb(24)), "which its own limit ends for good"
    assert compiler_of(own) == compiler, "nothing starts again"
    own.end_processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_service_managers_send_to_every_process_ends_no_compilation(number: int) -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    compiler = compiler_of(own)
    for process in (compiler, fork):
        process.send_signal(number)
    checking.join(20)
    assert "too much time" in str(found[0])
    assert compiler_of(own) == compiler
    own.end_processes()


def test_a_compiler_that_ends_while_it_is_asked_is_not_the_fault_of_the_grammar() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    compiler_of(own).kill()
    fork.kill()
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "ended" in str(found[0])
    assert not is_kept(own, json=bomb(24))
    assert own.compile_params(StructuredOutputsParams(regex="a"))
    own.end_processes()


def test_a_compiler_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = silent_checker()
    silent.compilers[-1].start_process()
    assert silent.compilers[-1].pid is not None
    monkeypatch.setattr(silent.compilers[-1], "wall_seconds", 0.05)
    assert "too much time" in why(silent, regex="a")
    assert silent.compilers[-1].pid is None
    assert not is_kept(silent, regex="a"), "on another day it may be in time"


def test_closing_ends_a_check_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, found = silent_checker(), list[str]()
    silent.compilers[-1].start_process()
    asked = heard(monkeypatch)
    checking = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
    checking.start()
    assert asked.wait(20)
    start = time.monotonic()
    silent.end_processes()
    checking.join(20)
    assert time.monotonic() - start < JobProcess.wall_seconds / 2
    assert len(found) == 1 and silent.compilers[-1].pid is None
    assert "closed" in found[0] and not is_kept(silent, regex="a"), "no fault of the grammar"


def test_a_process_that_begins_after_the_closing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, real = silent_checker(), subprocess.Popen

    def begin(*command: Any, **how: Any) -> subprocess.Popen[bytes]:
        closing.start()  # there is no process to end, and it waits for this check
        while not silent.compilers[-1].closings:
            assert closing.is_alive()
        return real(*command, **how)

    closing = threading.Thread(target=silent.end_processes)
    monkeypatch.setattr(module.subprocess, "Popen", begin)
    start = time.monotonic()
    assert "closed" in why(silent, regex="a")
    closing.join(20)
    assert time.monotonic() - start < JobProcess.wall_seconds / 2
    assert silent.compilers[-1].pid is None


def test_a_check_that_begins_as_the_process_is_being_ended_keeps_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, found = silent_checker(), list[str]()
    silent.compilers[-1].start_process()
    first, real, asked = silent.compilers[-1].pid, module.kill, heard(monkeypatch)
    assert first is not None

    def kill(process: subprocess.Popen[bytes]) -> None:
        if process.pid == first and not checking.ident:
            # After the closing has been counted, and it gets the process that is about to end
            checking.start()
            assert asked.wait(20)
        real(process)

    checking = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
    monkeypatch.setattr(module, "kill", kill)
    silent.end_processes()
    checking.join(20)
    assert "closed" in found[0] and not is_kept(silent, regex="a")


def test_checks_that_waited_for_a_closing_start_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, found = silent_checker(), list[str]()
    compiler = silent.compilers[-1]
    lock, asked = threading.Lock(), threading.Event()

    class Asked:
        """The process's lock, which tells when it is asked for."""

        def __enter__(self) -> None:
            asked.set()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(compiler, "_lock", Asked())
    closing = threading.Thread(target=silent.end_processes)
    with lock:
        waiting = threading.Thread(target=lambda: found.append(why(silent, regex="a")))
        waiting.start()
        assert asked.wait(20)
        closing.start()
        while not compiler.closings:
            assert closing.is_alive()
    waiting.join(20)
    closing.join(20)
    assert "closed" in found[0] and compiler.pid is None


def test_a_grammar_whose_check_was_closed_compiles_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Checker(SPECIALS)
    own.compile_params(StructuredOutputsParams(regex="a"))
    # So that the check is under way for as long as the test wants
    compiler_of(own).suspend()
    asked, found = heard(monkeypatch), list[str]()
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
        assert not is_kept(checker, regex="a")


def test_closing_ends_the_fork_that_does_a_job() -> None:
    own = Checker(SPECIALS)
    checking, found, fork = under_way(own, json=bomb(24))
    own.end_processes()
    checking.join(20)
    assert isinstance(found[0], CompilerLost) and "closed" in str(found[0])
    psutil.wait_procs([fork], 20)
    assert not fork.is_running()
