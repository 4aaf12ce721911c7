"""Runs a checkout under `recorder` and finds the files on its paths."""

from __future__ import annotations

import contextlib
import http.client
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.walks import recorder, steps
from tools.walks.paths import (
    Entry,
    added,
    common,
    decode_trace,
    files_of,
    sizing,
    steady_step,
)

START_SECONDS, SETTLE_SECONDS, SETTLE_TRIES = 300, 1.5, 60
REPEATS = 3
START, QUIET, CHAT, STREAM, ABORT = 1, 2, 3, 4, 5
SERVER = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "2048")
CHAT_BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 27 + 58?"}],
    "temperature": 0,
    "max_tokens": 12,
    "stream": True,
}
STREAM_BODY = CHAT_BODY | {"max_tokens": 1900, "ignore_eos": True}
CHUNKS_BEFORE, CHUNKS_AFTER = 80, 40


class Recording:
    """A folder with what the processes of one checkout record.

    Attributes:
        environment: of the processes that are to be recorded.
    """

    def __init__(self, root: Path, folder: Path):
        self._folder = folder / "entries"
        self._folder.mkdir()
        hook = folder / "hook"
        hook.mkdir()
        shutil.copy(recorder.__file__, hook / "sitecustomize.py")
        phase_file = self._folder / recorder.PHASE_FILE
        phase_file.write_bytes(bytes(1))
        with phase_file.open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        dropped = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
        self.environment = {name: os.environ[name] for name in os.environ if name not in dropped}
        self.environment |= {
            "PYTHONPATH": f"{hook}{os.pathsep}{root}",
            recorder.ROOT_VARIABLE: str(root),
            recorder.FOLDER_VARIABLE: str(self._folder),
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HOME": str(folder),
        }

    @contextlib.contextmanager
    def phase(self, number: int) -> Iterator[None]:
        """What runs meanwhile is of this phase."""
        self._phase[0] = number
        yield
        self._phase[0] = 0

    def entries(self, phase: int) -> list[Entry]:
        """What ran in a phase, in order of time over all processes."""
        lines = [
            json.loads(line)
            for path in sorted(self._folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        entries = [Entry(**line) for line in lines if line["phase"] == phase]
        return sorted(entries, key=lambda entry: entry.ns)


class Phases:
    """Numbers of phases that are measured once each, so that a function's first entry counts."""

    def __init__(self) -> None:
        self._next = 0

    def new(self) -> int:
        """A number that no phase of this recording has had. Raises ValueError when all have."""
        self._next += 1
        if self._next >= recorder.EVERY:
            raise ValueError("a recording has too many phases")
        return self._next


def paths(root: Path) -> dict[str, list[str]]:
    """The files on each path of a checkout, in the order in which they are first entered."""
    root = root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        library = library_paths(root, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        return server_paths(root, Path(folder)) | library


def library_paths(root: Path, folder: Path) -> dict[str, list[str]]:
    """The host's files in every steady step, and the device's in a decode program's trace."""
    recording = Recording(root, folder)
    command = [sys.executable, str(Path(steps.__file__).resolve())]
    subprocess.run(command, cwd=root, env=recording.environment, check=True)
    return {
        "decode step, host": steady_step(recording.entries(steps.STEPS), steps.TOKENS),
        "decode step, device": decode_trace(recording.entries(steps.TRACE)),
    }


def server_paths(root: Path, folder: Path) -> dict[str, list[str]]:
    """The files of a start, of sizing within it, of a chat and of an abort."""
    recording = Recording(root, folder)
    phases = Phases()
    start = phases.new()
    with recording.phase(start):
        server = Server(root, recording.environment, folder)
        server.wait_until_ready()
    try:
        settle(recording, phases)
        for _ in range(2):  # what first requests alone do
            server.chat()
            abort(server, recording, phases)
        settle(recording, phases)
        chats = []
        for _ in range(REPEATS):
            phase = phases.new()
            with recording.phase(phase):
                server.chat()
                time.sleep(0.3)
            chats.append(recording.entries(phase))
        aborts = [abort(server, recording, phases) for _ in range(REPEATS)]
    finally:
        server.end()
    started = recording.entries(start)
    return {
        "start": files_of(started),
        "memory sizing": sizing(started),
        "abort": common(aborts),
        "chat": common(chats),
    }


def settle(recording: Recording, phases: Phases) -> None:
    """Wait until an engine that has no request does the same again and again."""
    before = None
    for _ in range(SETTLE_TRIES):
        phase = phases.new()
        with recording.phase(phase):
            time.sleep(SETTLE_SECONDS)
        now = {(entry.file, entry.function) for entry in recording.entries(phase)}
        if now == before:
            return
        before = now
    raise TimeoutError("the server does not come to rest")


def abort(server: Server, recording: Recording, phases: Phases) -> list[Entry]:
    """What runs when a client leaves, and did not run in the stream before; another stream goes on
    meanwhile, so that the engine is never idle."""
    streaming, leaving = phases.new(), phases.new()
    with server.stream() as stays:
        with server.stream() as leaves:
            stays.read(1)
            leaves.read(1)
            with recording.phase(streaming):
                leaves.read(CHUNKS_BEFORE)
            with recording.phase(leaving):
                leaves.leave()
                stays.read(CHUNKS_AFTER)
                time.sleep(0.2)
                stays.read(1)
    time.sleep(0.5)
    return added(recording.entries(leaving), recording.entries(streaming))


class Server:
    """A checkout's server of the demo model, in a process of its own."""

    def __init__(self, root: Path, environment: dict[str, str], folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = folder / "log"
        command = [sys.executable, "-m", "jaxllm.server", "--model", "demo", *SERVER]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self._port)],
                cwd=root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> None:
        """Return when requests are served. Raises RuntimeError or TimeoutError with the log."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self._log.read_text()}")
            if time.monotonic() > deadline:
                self.end()
                raise TimeoutError(f"the server is not ready:\n{self._log.read_text()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self._port}/ready"
            return urllib.request.urlopen(url, timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def chat(self) -> None:
        """One streamed chat, to its end."""
        with Stream(self._port, CHAT_BODY) as stream:
            stream.read_all()

    def stream(self) -> Stream:
        """A long streamed chat."""
        return Stream(self._port, STREAM_BODY)

    def end(self) -> None:
        """Stop the server, which ends its processes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Stream:
    """A streamed chat over a connection of its own."""

    def __init__(self, port: int, body: dict[str, Any]):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self._reply = self._connection.getresponse()
        if self._reply.status != 200:
            raise RuntimeError(self._reply.read().decode())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def read(self, chunks: int) -> None:
        """Read so many events. Raises EOFError when the stream has ended."""
        while chunks:
            line = self._reply.readline()
            if not line or line.startswith(b"data: [DONE]"):
                raise EOFError("the stream has ended")
            chunks -= line.startswith(b"data: ")

    def read_all(self) -> None:
        """Read to the end."""
        self._reply.read()

    def leave(self) -> None:
        """Close the connection."""
        self._reply.close()
        self._connection.close()
