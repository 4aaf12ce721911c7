"""The server as a process: what it checks first, how it stops, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from jaxllm.server.command_line.options import parse
from jaxllm.server.lifecycle.serve import announce
from jaxllm.server.transport.sockets import MAX_FILES, bind, raise_file_limit
from tests.server.harness import Open
from tests.server.processes import await_gone, gone

pytestmark = pytest.mark.usefixtures("hang_ups")


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


@pytest.mark.slow
def test_a_body_that_is_still_on_its_way_is_not_waited_for(launch: Any) -> None:
    server = launch().up()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
        b"content-length: 1000\r\n\r\n"
    )
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
        server.says("not waiting for 1 requests")
        assert server.ended() == 128 + signal.SIGINT
    assert gone(engine)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_the_end_of_a_terminal_drains_too_and_is_no_second_signal(launch: Any, first: int) -> None:
    server = launch(frozen=True).up()
    with server.begin(stream=True) as stream:
        server.busy()
        server.process.send_signal(first)
        server.says("shutting down")
        # The kernel and a shell both send it; a service manager to every process
        for process in (server.process.pid, server.engine):
            os.kill(process, signal.SIGHUP)
        assert server.get("/ready")[0] == 503
        os.kill(server.engine, signal.SIGUSR1)
        assert stream.status() == 200
        assert stream.rest().rstrip(b"\r\n0").endswith(b"data: [DONE]")
    assert server.ended() == 0
    assert "not waiting" not in server.log and "Traceback" not in server.log


def test_a_server_under_nohup_outlives_its_terminal(launch: Any) -> None:
    server = launch(before=("nohup",)).up()
    for process in (server.process.pid, server.engine):
        os.kill(process, signal.SIGHUP)
    assert server.get("/ready")[0] == 200
    with server.begin() as whole:
        assert whole.status() == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def test_the_end_of_a_terminal_ends_a_start(launch: Any, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(gate=gate)
    with gate.open("wb"):
        engine = server.engine
        server.process.send_signal(signal.SIGHUP)
        assert server.ended() == 128 + signal.SIGHUP
        assert gone(engine)


AT_TERMINAL = """if True:
    import fcntl, runpy, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    runpy.run_module("tests.server.serve_fake", run_name="__main__")
"""


def test_a_server_whose_terminal_is_gone_drains_though_it_cannot_log(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ours, terminal = os.openpty()
    pids = tmp_path / "pids"
    flags = ["--model", str(model_dir), "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *flags, "--skip-tokenizer-init"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env=os.environ | {"FAKE_ENGINE_PID": str(pids)},
    )
    os.close(terminal)
    shown = b""
    while b" on http://127.0.0.1:" not in shown:
        shown += os.read(ours, 1 << 12)
    os.close(ours)  # the kernel sends SIGHUP, and writing fails from now on
    assert server.wait(60) == 0
    await_gone(int(pids.read_text()))


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


def test_while_it_loads_a_server_answers_how_far_it_is(launch: Any, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch("--api-key", "key", gate=gate).answering()
    with gate.open("wb"):
        while (found := server.get("/health"))[1].find(b"compiled") < 0:
            assert found[0] == 503
        health = json.loads(found[1])
        assert (health["status"], health["last_step_age_s"]) == ("loading", 0)
        assert health["progress"] == "loading m: compiled 12 of 36 programs"
        status, ready = server.get("/ready")
        assert (status, json.loads(ready)["status"]) == (503, "loading")
        assert server.get("/version")[0] == 200
        status, page = server.get("/")
        assert status == 503 and b"compiled 12 of 36" in page
        assert server.get("/v1/models")[0] == 401, "keys are asked for as ever"
        waiting = Open(server.port, get("/v1/models"))
        refused = waiting.answer()
        assert refused.status == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.error["code"] == "loading" and "12 of 36" in refused.error["message"]
        with Open(server.port, get("/v1/messages")) as messages:
            assert messages.answer().json()["type"] == "error"
    server.up()
    with waiting:  # the same connection
        waiting.send(get("/v1/models"))
        assert waiting.answer().json()["data"][0]["id"] == "m"
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer key\r\n\r\n".encode()


@pytest.mark.slow
def test_a_start_without_a_terminal_says_every_ten_seconds_how_far_it_is(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(gate=gate)
    with gate.open("wb"):
        server.says("loading m: compiled 12 of 36 programs, 10 s so far")
    server.up()


def test_a_restarted_engine_says_how_far_it_is(launch: Any, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch(gate=gate)
    with gate.open("wb"):
        pass
    os.kill(server.up().engine, signal.SIGKILL)
    with gate.open("wb"):  # opens when the next engine loads
        while (health := json.loads(server.get("/health")[1])).get("progress") != (
            "compiled 12 of 36 programs"
        ):
            assert health["status"] in ("restarting", "dead")
        assert health["status"] == "restarting"


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


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_one_line_too(launch: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    server = launch("--model", str(tmp_path), "--no-skip-tokenizer-init")
    assert server.ended() == 1
    assert server.log.splitlines()[-1].startswith("jaxllm: error: no usable tokenizer")
    assert "Traceback" not in server.log


@pytest.mark.parametrize("fault", ["template", "files"])
def test_a_tokenizer_that_cannot_serve_ends_the_start_in_one_line(
    launch: Any, model_dir: pathlib.Path, tmp_path: pathlib.Path, fault: str
) -> None:
    shutil.copytree(model_dir, copy := tmp_path / "model")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    if fault == "template":
        broken = config | {"chat_template": "{% if messages %}never ended"}
        (copy / "tokenizer_config.json").write_text(json.dumps(broken))
    else:
        (copy / "tokenizer.json").unlink()
    server = launch("--model", str(copy), "--no-skip-tokenizer-init")
    assert server.ended() == 1
    assert server.log.splitlines()[-1].startswith("jaxllm: error: ")
    assert ("template" if fault == "template" else "tokenizer") in server.log.splitlines()[-1]
    assert "Traceback" not in server.log and "serving" not in server.log


@pytest.mark.slow
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
    assert not path.exists()


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
        announce(options, options.settings.served, sock)
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
