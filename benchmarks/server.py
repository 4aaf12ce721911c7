"""Servers of a benchmark's own: start, wait until they are ready, end."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks.shapes import PREFIX, write, write_tokenizer

START_SECONDS = 1800.0  # for which a server may load and compile
END_SECONDS = 30.0  # for which it may end by itself
TAIL = 2000  # characters of a log that a message quotes


class Server:
    """`python -m jaxllm.server WORDS` as a process, on a free port of this machine.

    `environment` is added to this process's; `log` is a file for what it writes, which else stands
    among what this process writes.
    """

    def __init__(
        self,
        words: list[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._begin = time.perf_counter()
        where = ["--host", "127.0.0.1", "--port", str(port)]
        with open(log, "w") if log else contextlib.nullcontext() as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxllm.server", *words, *where],
                env=os.environ | dict(environment or {}),
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
            )

    def wait(self, seconds: float = START_SECONDS) -> float:
        """Seconds from the start until it takes requests. Raises SystemExit when it ends before, or
        takes longer than `seconds`."""
        while not ready(f"{self.url}/ready"):
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended before it was ready{self.tail()}")
            if time.perf_counter() - self._begin > seconds:
                raise SystemExit(f"the server was not ready in {seconds:g} s{self.tail()}")
            time.sleep(0.05)
        return round(time.perf_counter() - self._begin, 2)

    def tail(self) -> str:
        """The last lines of the log, for a message; nothing where there is no log."""
        return f":\n{self.log.read_text()[-TAIL:]}" if self.log else ""

    def kill(self) -> None:
        """End it and its engine at once, as a lost machine would."""
        self._end(self._family(), 0.0)

    def close(self) -> None:
        """Have it end, and wait until nothing of it is left."""
        family = self._family()
        if self.process.poll() is None:
            self.process.terminate()
        self._end(family, END_SECONDS)

    def _family(self) -> list[psutil.Process]:
        """The processes that are still there."""
        if self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _end(self, family: list[psutil.Process], seconds: float) -> None:
        """Kill what is left after `seconds`."""
        for one in alive(family, seconds):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        if left := alive(family, END_SECONDS):
            raise SystemExit(f"processes of the server do not end: {left}")
        self.process.wait(END_SECONDS)


def alive(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Which of the processes run after `seconds`; returns sooner when none does. Those that nobody
    has reaped have ended."""

    def runs(one: psutil.Process) -> bool:
        try:
            return one.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while (left := [one for one in family if runs(one)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def words_of(arguments: str, folder: Path) -> list[str]:
    """The arguments of a server. `shape:NAME` as the first one stands for random weights of a
    shape, which is written into `folder`. Raises SystemExit on a shape that is none."""
    words = shlex.split(arguments)
    if words[0].startswith(PREFIX):
        directory = write(words[0].removeprefix(PREFIX), folder)
        write_tokenizer(directory)
        words[:1] = [str(directory), "--load-format", "dummy"]
    return words


@contextlib.contextmanager
def served(arguments: str | None, base_url: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The URL of a server, and how long it took to be ready: one that is there, or with `arguments`
    (`words_of`) one of our own that ends afterwards. Raises SystemExit when the server ends before
    it is ready."""
    if arguments is None:
        yield base_url, {}
        return
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Server(words_of(arguments, Path(folder)))) as server:
            seconds = server.wait()
            yield server.url, {"server_ready_s": seconds}


def ready(url: str) -> bool:
    """Whether a server takes requests."""
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False
