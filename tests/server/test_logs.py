"""Log lines as JSON, with the id of the request that they are about."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from jaxllm.engine.startup.report import LogReport
from jaxllm.server.logs import JsonFormatter
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Open, Running, with_settings

# An engine process that says three things and ends
ENGINE = """
import logging, socket, sys
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.server.engine import process, wire

def factory(config, on_phase):
    logging.getLogger("jaxllm.engine").info("a phase")
    logging.getLogger("jax._src.xla_bridge").info("no other devices")
    logging.getLogger("jax._src.xla_bridge").warning("a warning")
    raise ConfigError("that is all")

ours, theirs = socket.socketpair()
ours.sendall(wire.encode(wire.Start(EngineConfig())))
sys.exit(process.main(["--fd", str(theirs.detach()), *sys.argv[1:]], factory))
"""


def lines_of(process: Any) -> list[dict[str, Any]]:
    """The log, every line of which must be an object."""
    return [json.loads(line) for line in process.log.splitlines()]


def test_every_line_of_a_server_is_an_object_of_json(launch: Any) -> None:
    flags = ("--log-format", "json", "--access-log", "--log-stats-interval", "0.05")
    server = launch(*flags, "--enable-reasoning", "--admin-key", "hush").up()
    odd = b"GET /a%0Aline HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\n\r\n"
    with Open(server.port, odd) as connection:
        assert connection.answer().status == 404
    with server.begin() as connection:
        assert connection.answer().status == 200
    server.get("/health")
    server.says("generation ")
    server.process.terminate()
    assert server.ended() == 0
    lines = lines_of(server)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    access = [line for line in lines if line["logger"] == "jaxllm.access"]
    assert [(line["method"], line["path"], line["status"]) for line in access] == [
        ("GET", "/a%0Aline", 404),
        ("POST", "/v1/completions", 200),
    ]
    assert access[0]["request_id"] == "mine"
    assert access[0]["message"].startswith("mine GET /a%0Aline 404 ")
    assert "hush" not in server.log
    messages = [line["message"] for line in lines]
    assert any("admin-key=*** (command line)" in message for message in messages)
    assert {line["level"] for line in lines if "--enable-reasoning" in line["message"]} >= {
        "warning"
    }


def test_a_line_about_a_request_has_its_id(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    shown = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(JsonFormatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("jaxllm.server")
    logger.addHandler(handler)
    try:
        with (
            caplog.at_level("INFO", "jaxllm.server"),
            Running(tokenizer, with_settings(log_requests=True)) as server,
        ):
            for id in ("first", "second"):
                body = {"model": "fake", "prompt": "abc", "max_tokens": 1}
                server.request("POST", "/v1/completions", body, {"x-request-id": id})
    finally:
        logger.removeHandler(handler)
    found = [json.loads(line) for line in shown if "prompts of" in line]
    assert [line["request_id"] for line in found] == ["first", "second"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], ["a phase", "a warning"]),
        (["--log-level", "warning"], ["a warning"]),
        (["--log-level", "error"], []),
    ],
    ids=["info", "warning", "error"],
)
@pytest.mark.parametrize("form", ["json", "text"])
def test_an_engine_process_says_what_the_level_lets_through(
    flags: list[str], said: list[str], form: str
) -> None:
    """Of JAX warnings alone: which devices it does not find is no news."""
    command = [sys.executable, "-c", ENGINE, "--log-format", form, *flags]
    shown = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    lines = shown.stderr.splitlines()
    assert shown.returncode == 1  # of its own, or because the line is cut
    if form == "json":
        assert [json.loads(line)["message"] for line in lines] == said
    else:
        assert [line.rpartition(": ")[2] for line in lines] == said


def test_an_exception_and_odd_text_stay_on_one_line() -> None:
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "it %s\n", ("failed",), sys.exc_info()
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "it failed\n"
    assert "ValueError: two\nlines ?" in entry["exception"]
    assert "request_id" not in entry


def test_a_start_whose_log_is_read_by_machines_has_no_bars(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = LogReport()
    with caplog.at_level("INFO", "jaxllm.engine"), report.phase("Loading weights") as progress:
        progress(1, 2)
    report.show_table("jaxllm", [("dtype", "float32")])
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("Loading weights took 0.0")
