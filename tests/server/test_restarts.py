"""A dead engine process is replaced while the server answers, within bounds."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
from typing import Any

import pytest

from tests.server.processes import await_gone, gone


def test_a_dead_engine_is_restarted_while_the_server_answers(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch("--max-num-queued-reqs", "1", frozen=True, gate=gate)
    gate.write_bytes(b"")  # the engine may load
    server.up()
    first = server.engine
    with server.begin(n=8) as whole, server.begin(stream=True) as stream:
        while json.loads(server.get("/ready")[1])["status"] != "full":  # 8 run, 1 is queued
            pass
        os.kill(first, signal.SIGKILL)
        for ended in (whole.answer(), stream.answer()):
            assert (ended.status, ended.error["type"]) == (500, "server_error")
    server.says("the engine process of m died")
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
    metrics = server.get("/metrics")[1]
    assert restarts in metrics
    assert b'model_name="m",reason="engine_down"} 1.0' in metrics
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


@pytest.mark.slow
def test_an_engine_that_dies_while_it_loads_uses_up_a_restart(
    launch: Any, tmp_path: pathlib.Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    server = launch("--max-engine-restarts", "2", frozen=True, gate=gate)
    gate.write_bytes(b"")
    os.kill(server.up().engine, signal.SIGKILL)
    with gate.open("wb"):  # opens when the next engine loads
        second = server.engine
        os.kill(second, signal.SIGKILL)
        server.says("restart 1 of the engine failed")
        assert json.loads(server.get("/health")[1])["status"] == "restarting"
        await_gone(second)  # it hangs up before it lets go of the gate
    gate.write_bytes(b"")
    server.says("the engine serves again after restart 2")
    with server.begin() as last:
        server.busy()
        os.kill(server.engine, signal.SIGKILL)
        assert last.status() == 500
    assert server.ended() == 1
    assert "not restarted again" in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_an_engine_that_dies_during_a_drain_ends_the_server(launch: Any) -> None:
    server = launch("--shutdown-timeout", "600", frozen=True).up()
    with server.begin() as whole, server.begin(stream=True) as stream:
        server.busy()
        server.process.send_signal(signal.SIGTERM)
        server.says("shutting down: 2 requests")
        os.kill(server.engine, signal.SIGKILL)
        for ended in (whole.answer(), stream.answer()):
            assert (ended.status, ended.error["type"]) == (500, "server_error")
    assert server.ended() == 1
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_without_restarts_the_engines_death_ends_the_server_after_its_replies(launch: Any) -> None:
    server = launch("--max-engine-restarts", "0", frozen=True).up()
    with server.begin() as whole:
        server.busy()
        os.kill(server.engine, signal.SIGKILL)
        ended = whole.answer()
        assert (ended.status, ended.error["type"]) == (500, "server_error")
    assert server.ended() == 1
    assert "the engine process of m died" in server.log


@pytest.mark.slow
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


def test_one_of_two_engines_that_dies_takes_its_own_streams_alone_and_is_restarted(
    launch: Any,
) -> None:
    server = launch("--data-parallel-size", "2", frozen=True).up()
    with server.begin() as first, server.begin() as second:
        while any(
            each["last_step_age_s"] == 0 for each in json.loads(server.get("/health")[1])["engines"]
        ):
            pass  # each has one
        dead, alive = server.engines
        os.kill(dead, signal.SIGKILL)
        server.says("process of m died")
        assert server.get("/ready")[0] == 200
        os.kill(alive, signal.SIGUSR1)
        answers = [first.answer(), second.answer()]
        assert sorted(answer.status for answer in answers) == [200, 500]
    server.says("serves again after restart 1")
    os.kill(server.engine, signal.SIGUSR1)
    with server.begin() as third, server.begin() as fourth:
        assert third.status() == fourth.status() == 200
    assert server.get("/health")[0] == 200
    metrics = server.get("/metrics")[1]
    restarts = re.findall(rb"jaxllm:engine_restarts_total{.*} (.*)", metrics)
    assert sorted(restarts) == [b"0.0", b"1.0"]
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0
    assert all(gone(engine) for engine in server.engines)
