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
from collections.abc import Callable, Iterator
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

START_SECONDS, REST_SECONDS = 300, 120
STARTED_SECONDS, DONE_SECONDS = 5.0, 1.5  # without a new function: then it is over
POLL_SECONDS = 0.1
WARM_UPS, REPEATS = 2, 3
SERVER = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "2048")
CHAT_BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 27 + 58?"}],
    "temperature": 0,
    "max_tokens": 12,
    "stream": True,
}
STREAM_BODY = CHAT_BODY | {"max_tokens": 1900, "ignore_eos": True}
CHUNKS_BEFORE = 80


def pause() -> None:
    """Let others run."""
    time.sleep(POLL_SECONDS)


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

    def rest(self, seconds: float, meanwhile: Callable[[], None] = pause) -> None:
        """Call `meanwhile` until no function of the phase has run for the first time for so many
        seconds. Raises TimeoutError."""
        deadline = time.monotonic() + REST_SECONDS
        written = -1
        since = 0.0
        while time.monotonic() < since + seconds or written < 0:
            if time.monotonic() > deadline:
                raise TimeoutError("the processes do not come to rest")
            now = sum(path.stat().st_size for path in self._folder.glob("*.jsonl"))
            if now != written:
                written = now
                since = time.monotonic()
            meanwhile()

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
    chats: list[int] = []
    aborts: list[tuple[int, int]] = []
    with Server(root, recording.environment, folder) as server:
        with recording.phase(start):
            server.begin()
            recording.rest(STARTED_SECONDS)
        for _ in range(WARM_UPS + REPEATS):
            chats.append(chat(server, recording, phases))
            aborts.append(abort(server, recording, phases))
    started = recording.entries(start)
    streamed = [entry for before, _ in aborts for entry in recording.entries(before)]
    return {
        "start": files_of(started),
        "memory sizing": sizing(started),
        "abort": common(
            [added(recording.entries(after), streamed) for _, after in aborts[WARM_UPS:]]
        ),
        "chat": common([recording.entries(phase) for phase in chats[WARM_UPS:]]),
    }


def chat(server: Server, recording: Recording, phases: Phases) -> int:
    """Have one chat answered. Returns its phase."""
    phase = phases.new()
    with recording.phase(phase):
        with server.stream(CHAT_BODY) as stream:
            stream.read_all()
        recording.rest(DONE_SECONDS)
    return phase


def abort(server: Server, recording: Recording, phases: Phases) -> tuple[int, int]:
    """Have a client leave its stream, while another one goes on so that the engine is never idle.
    Returns the phases of both streams beside each other and of the leaving."""
    streaming = phases.new()
    leaving = phases.new()
    with server.stream(STREAM_BODY) as stays:
        with server.stream(STREAM_BODY) as leaves:
            stays.read(1)
            leaves.read(1)
            with recording.phase(streaming):
                leaves.read(CHUNKS_BEFORE)
            with recording.phase(leaving):
                leaves.leave()
                recording.rest(DONE_SECONDS, lambda: stays.read(1))
    time.sleep(DONE_SECONDS)
    return streaming, leaving


class Server:
    """A checkout's server of the demo model, in a process of its own, which ends with the block."""

    def __init__(self, root: Path, environment: dict[str, str], folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._root = root
        self._environment = environment
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self

    def begin(self) -> None:
        """Start it and return when it serves. Raises RuntimeError or TimeoutError with its log."""
        command = [sys.executable, "-m", "jaxllm.server", "--model", "demo", *SERVER]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self._port)],
                cwd=self._root,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self._log.read_text()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready:\n{self._log.read_text()}")
            pause()

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self._port}/ready"
            return urllib.request.urlopen(url, timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def stream(self, body: dict[str, Any]) -> Stream:
        """A streamed chat."""
        return Stream(self._port, body)

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
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
