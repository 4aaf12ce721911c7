"""The server as a process: what it checks first, how it stops, what it leaves behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest

from jaxllm.server.cli import parse
from jaxllm.server.lifecycle import announce
from jaxllm.server.transport.sockets import MAX_FILES, bind, raise_file_limit
from tests.server.harness import Open

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
    ):
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
            sys.executable,
            "-m",
            "tests.server.serve_fake",
            "--model",
            str(model_dir),
            "--served-model-name",
            "m",
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--skip-tokenizer-init", *flags],
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
        self.says("serving m on")
        self.port = int(self.log.partition("serving m on http://127.0.0.1:")[2].split(" ")[0])
        return self

    @property
    def engine(self) -> int:
        """The engine's process id."""
        return int(self._pid_file.read_text())

    def begin(self, **extra: Any) -> Open:
        """A completion under way."""
        data = json.dumps(BODY | extra).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        return Open(self.port, head.encode() + data)

    def busy(self) -> None:
        """Wait until a request waits for the engine."""
        while json.loads(self.get("/health")[1])["last_step_age_s"] == 0:
            pass

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
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


@pytest.fixture
def launch(model_dir: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Starts processes and ends them."""
    started: list[Process] = []

    def start(*flags: str, **options: Any) -> Process:
        started.append(Process(model_dir, tmp_path, *flags, **options))
        return started[-1]

    yield start
    for process in started:
        process.close()


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


def test_an_idle_server_stops_at_once_and_cleanly(launch: Any) -> None:
    server = launch().up()
    engine = server.engine
    assert server.get("/ready")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    assert gone(engine)
    assert "Traceback" not in server.log


def test_a_drain_lets_requests_finish_and_refuses_new_ones(launch: Any) -> None:
    server = launch(frozen=True).up()
    with server.begin() as whole, server.begin(stream=True) as stream:
        server.busy()
        os.kill(server.engine, signal.SIGTERM)  # systemd tells every process of a service
        server.process.send_signal(signal.SIGTERM)
        server.says("shutting down")
        assert server.get("/ready")[0] == 503
        assert server.get("/health")[0] == 200
        with server.begin() as late:
            assert late.status() == 503
        os.kill(server.engine, signal.SIGUSR1)
        assert whole.status() == 200
        assert stream.status() == 200
        assert stream.rest().rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert server.ended() == 0


def test_a_body_that_is_still_on_its_way_is_not_waited_for(launch: Any) -> None:
    server = launch().up()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n"
    with Open(server.port, head + b'{"prompt":') as upload:
        assert upload.status() == 100, "its body is being read"
        server.process.send_signal(signal.SIGTERM)
        assert upload.line() == b"\r\n" and upload.status() == 503
        assert b'"draining"' in upload.rest()
    assert server.ended() == 0
    assert "Cancel" not in server.log and "Traceback" not in server.log


def test_at_the_deadline_requests_end_with_an_error(launch: Any) -> None:
    server = launch("--shutdown-timeout", "0.2", frozen=True).up()
    with server.begin() as whole:
        server.busy()
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert whole.status() == 503
        os.kill(engine, signal.SIGUSR1)
    assert server.ended() == 0
    assert gone(engine)


def test_a_second_signal_does_not_wait(launch: Any) -> None:
    server = launch("--shutdown-timeout", "600", frozen=True).up()
    with server.begin():
        server.busy()
        engine = server.engine
        server.process.send_signal(signal.SIGINT)
        server.says("shutting down")
        server.process.send_signal(signal.SIGINT)
        server.says("not waiting")
        assert server.ended() == 128 + signal.SIGINT
    assert gone(engine)


def test_a_dead_engine_is_restarted_while_the_server_answers(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(frozen=True, gate=gate)
    gate.write_bytes(b"")  # the engine may load
    server.up()
    first = server.engine
    with server.begin() as whole, server.begin(stream=True) as stream:
        server.busy()
        os.kill(first, signal.SIGKILL)
        for ended in (whole.answer(), stream.answer()):
            assert (ended.status, ended.error["type"]) == (500, "server_error")
    server.says("the engine process died")
    for path in ("/health", "/ready"):
        status, body = server.get(path)
        assert (status, json.loads(body)["status"]) == (503, "restarting")
    with server.begin() as refused:
        answer = refused.answer()
        assert (answer.status, answer.error["code"]) == (503, "engine_down")
        assert int(answer.headers["retry-after"]) >= 1
    gate.write_bytes(b"")
    server.says("the engine serves again")
    assert server.engine != first
    os.kill(server.engine, signal.SIGUSR1)
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    with server.begin() as again:
        assert again.status() == 200
    restarts = b'jaxllm:engine_restarts_total{engine="0",model_name="m"} 1.0'
    assert restarts in server.get("/metrics")[1]
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def test_an_engine_that_dies_again_and_again_ends_the_server(launch: Any) -> None:
    server = launch("--max-engine-restarts", "1").up()
    os.kill(server.engine, signal.SIGKILL)
    server.says("the engine serves again")
    os.kill(server.engine, signal.SIGKILL)
    assert server.ended() == 1
    assert "not restarted again" in server.log
    assert "Traceback" not in server.log


def test_without_restarts_the_engines_death_ends_the_server_after_its_replies(launch: Any) -> None:
    server = launch("--max-engine-restarts", "0", frozen=True).up()
    with server.begin() as whole:
        server.busy()
        os.kill(server.engine, signal.SIGKILL)
        ended = whole.answer()
        assert (ended.status, ended.error["type"]) == (500, "server_error")
    assert server.ended() == 1
    assert "the engine process died" in server.log


def test_a_signal_during_a_restart_ends_everything(launch: Any, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(gate=gate)
    gate.write_bytes(b"")
    os.kill(server.up().engine, signal.SIGKILL)
    with gate.open("wb"):  # opens when the next engine loads
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 1
        assert gone(engine)
    assert "Traceback" not in server.log


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
        from jaxllm.server.signals import end_on
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


def test_the_engine_does_not_outlive_the_server(launch: Any) -> None:
    server = launch().up()
    engine = server.engine
    server.process.kill()
    await_gone(engine)


def test_a_signal_while_loading_ends_everything(launch: Any, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(gate=gate)
    # Opens when the engine has begun to load, which it never ends: nothing is written
    with gate.open("wb"):
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM
        assert gone(engine)
    assert "serving" not in server.log
    assert "Traceback" not in server.log


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The real command, which must fail before it starts an engine."""
    command = [sys.executable, "-m", "jaxllm.server", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | environ
    )


@pytest.mark.parametrize("case", ["port", "model", "empty", "template"])
def test_what_cannot_work_is_said_in_one_line_before_any_loading(
    case: str, model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1] if case == "port" else 0)
        model = {
            "port": model_dir,
            "model": tmp_path / "nothing",
            "empty": tmp_path,
            "template": model_dir,
        }[case]
        flags = ["--chat-template", str(tmp_path / "none.jinja")] if case == "template" else []
        found = run("--host", "127.0.0.1", "--port", port, "--model", str(model), *flags)
    assert found.returncode == 1
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    expected = {
        "port": f"port {port}",
        "model": "does not exist",
        "empty": "config.json",
        "template": "none.jinja",
    }[case]
    assert expected in found.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8'; it must be a positive integer"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_fault_of_config_json_is_named_before_the_tokenizer_is_read(
    tmp_path: pathlib.Path, config: Any, message: str
) -> None:
    text = config if isinstance(config, str) else json.dumps({"model_type": "llama"} | config)
    (tmp_path / "config.json").write_text(text)
    found = run("--host", "127.0.0.1", "--port", "0", "--model", str(tmp_path))
    assert (found.returncode, found.stdout, len(found.stderr.splitlines())) == (1, "", 1)
    assert message in found.stderr and "tokenizer" not in found.stderr


def test_what_the_engine_refuses_is_one_line_too(launch: Any) -> None:
    server = launch("--max-model-len", "-7")
    assert server.ended() == 1
    assert (
        server.log.splitlines()[-1] == "jaxllm: error: --max-model-len must be at least 1, got -7"
    )
    assert "Traceback" not in server.log


def test_a_model_without_a_tokenizer_is_one_line_too(launch: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    server = launch("--model", str(tmp_path), "--no-skip-tokenizer-init")
    assert server.ended() == 1
    assert server.log.splitlines()[-1].startswith("jaxllm: error: no usable tokenizer")
    assert "Traceback" not in server.log


def test_a_unix_socket_is_served_and_a_stale_one_replaced(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = launch("--uds", str(path))
    server.says("serving m on the Unix socket")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def test_a_token_is_sent_at_once_and_not_held_back_until_the_one_before_is_acknowledged() -> None:
    held: list[int] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(
            writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        )
        writer.close()
        await writer.wait_closed()

    async def connect() -> None:
        sock = bind("127.0.0.1", 0, None)
        async with await asyncio.start_server(accept, sock=sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            await reader.read()
            writer.close()
            await writer.wait_closed()

    asyncio.run(connect())
    assert held and all(held)


def test_the_line_that_says_where_it_serves_names_routes_that_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = parse(
        ["--model", "m", "--host", "127.0.0.1", "--port", "0", "--root-path", "/api"], {}
    )
    with (
        bind(options.host, options.port, options.uds) as sock,
        caplog.at_level("INFO", logger="jaxllm.server"),
    ):
        announce(options, sock)
        assert f"http://127.0.0.1:{sock.getsockname()[1]} (" in caplog.text
    assert "which a proxy shows under /api/v1" in caplog.text


def test_a_server_takes_more_connections_than_a_shell_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
