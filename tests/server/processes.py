"""Server processes over the fake engine, and whether processes have ended."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any, Self

from tests.server.harness import Open, post_head

BODY = {"model": "m", "prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 50}


class Process:
    """A server process over the fake engine; `log` is its stderr so far."""

    def __init__(
        self,
        model_dir: pathlib.Path,
        tmp: pathlib.Path,
        *flags: str,
        frozen: bool = False,
        gate: pathlib.Path | None = None,
        stuck: str = "",
        tokenizer: bool = False,
        config: pathlib.Path | None = None,
        before: tuple[str, ...] = (),
    ):
        """`config` lists models in place of `model_dir`; the first is served as m. `before` is a
        command that runs the server."""
        models = () if "--model" in flags else ("--model", str(model_dir))
        models = (*models, "--served-model-name", "m")
        self._pid_file = tmp / "engine.pid"
        environ = (
            os.environ
            | {"FAKE_ENGINE_PID": str(self._pid_file)}
            | ({"FAKE_ENGINE_FROZEN": "1"} if frozen else {})
        )
        if gate is not None:
            environ["FAKE_ENGINE_GATE"] = str(gate)
        if stuck:
            environ["STUCK_TOKENIZER"] = stuck
        command = [
            *before,
            sys.executable,
            "-m",
            "tests.server.serve_fake",
            *(models if config is None else ("--config", str(config))),
            "--port",
            "0",
        ]
        skipped = () if tokenizer else ("--skip-tokenizer-init",)
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *skipped, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.log = ""
        self.port = 0
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                with self._heard:
                    self.log += line
                    self._heard.notify_all()

    def says(self, text: str, timeout: float = 120) -> None:
        """Wait for a line in the log."""
        with self._heard:
            assert self._heard.wait_for(lambda: text in self.log, timeout), self.log

    def up(self) -> Self:
        """Wait until it serves."""
        self.says(" on http://127.0.0.1:")
        self.port = int(self.log.partition(" on http://127.0.0.1:")[2].split(" ")[0])
        return self

    def answering(self) -> Self:
        """Wait until it answers while it loads."""
        self.says("/health at http://127.0.0.1:")
        self.says(" says how far it is")
        self.port = int(self.log.partition("/health at http://127.0.0.1:")[2].split(" ")[0])
        return self

    @property
    def engine(self) -> int:
        """The process id of the engine that was started last."""
        return self.engines[-1]

    @property
    def engines(self) -> list[int]:
        """The process ids of all engines, in the order of their starts."""
        return [int(line) for line in self._pid_file.read_text().split()]

    def begin(self, **extra: Any) -> Open:
        """A completion under way."""
        data = json.dumps(BODY | extra).encode()
        return Open(self.port, post_head("/v1/completions", len(data)) + data)

    def begin_chat(self, content: str) -> Open:
        """A chat of one message under way."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        data = json.dumps(body).encode()
        return Open(self.port, post_head("/v1/chat/completions", len(data)) + data)

    def busy(self) -> None:
        """Wait until a request waits for the engine."""
        while json.loads(self.get("/health")[1])["last_step_age_s"] == 0:
            pass

    def get(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body; with `body`, of a POST."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        try:
            connection.request("GET" if body is None else "POST", path, data)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def ended(self, timeout: float = 60) -> int:
        """The exit status; the engine process must be gone too."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def close(self) -> None:
        """Whatever happened, nothing stays."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(60)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def await_gone(pid: int) -> None:
    """Wait for a process that is not our child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        ready, _, _ = select.select([watch], [], [], 60)
        assert ready
    finally:
        os.close(watch)
