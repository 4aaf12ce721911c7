"""A start that is stuck in a library ends when a signal comes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.server.processes import await_gone


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("lock", ["held", "released"])
def test_a_signal_ends_a_start_that_is_stuck_in_the_tokenizers_library(
    launch: Any, lock: str, number: int, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch("--no-skip-tokenizer-init", stuck=lock, gate=gate)
    server.says("loading the tokenizer")
    engine = server.engine  # stuck in the same library when the lock is held
    server.process.send_signal(number)
    assert server.ended(20) == -number
    await_gone(engine)


@pytest.mark.parametrize(
    "module", ["jaxllm.server.command_line.options", "jaxllm.config", "asyncio"]
)
def test_an_interrupt_during_the_first_imports_ends_the_process_without_a_traceback(
    module: str,
) -> None:
    code = """if True:
        import os, runpy, signal, sys

        class Interrupting:
            def find_spec(self, name, *_):
                if name == sys.argv[1]:
                    os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored in the background
        sys.meta_path.insert(0, Interrupting())
        runpy.run_module("jaxllm.server", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", code, module], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_what_the_engine_refuses_ends_a_start_that_is_stuck_in_the_tokenizers_library(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    flags = ("--no-skip-tokenizer-init", "--max-model-len", "-7")
    server = launch(*flags, stuck="released", gate=gate)
    assert server.ended(20) == 1
    assert "--max-model-len must be at least 1" in server.log.splitlines()[-1]


def test_a_signal_ends_the_first_process_of_a_container_too() -> None:
    code = """if True:
        import signal
        from jaxllm.server.lifecycle.signals import end_on
        from tests.server.stuck import never_return
        end_on(signal.SIGTERM, first_process=True)
        print("ready", flush=True)
        never_return(holding_the_lock=True)
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == signal.SIGTERM
