"""Sleep, waking up and other weights, as operators ask for them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server import fake
from tests.server.harness import Answer, Open, Running, with_settings
from tests.server.stepped import Stepped

ROOT = {"authorization": "Bearer root"}
QUESTION = {"model": "fake", "prompt": "abc", "max_tokens": 2}


@pytest.fixture
def running(tokenizer: Tokenizer) -> Iterator[Running]:
    with Running(tokenizer, with_settings(admin_keys=("root",))) as running:
        yield running


def told(running: Running, path: str, body: bytes = b"") -> Answer:
    return running.post(path, body, **ROOT)


def states(running: Running) -> dict[str, float]:
    lines = running.get("/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:engine_sleep_state{")]
    return {line.split('sleep_state="')[1].split('"')[0]: float(line[-3:]) for line in found}


def test_a_model_that_sleeps_refuses_requests_until_it_is_woken(running: Running) -> None:
    assert running.post("/v1/completions", QUESTION).status == 200
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}
    for level, name in (("1", "weights_offloaded"), ("2", "discard_all")):
        assert told(running, f"/sleep?level={level}").status == 200
        assert running.get("/is_sleeping").json() == {"is_sleeping": True}
        assert states(running)[name] == 1 == sum(states(running).values())
        assert running.get("/health").status == 200
        ready = running.get("/ready")
        assert (ready.status, ready.json()["status"]) == (503, "sleeping")
        refused = running.post("/v1/completions", QUESTION)
        assert (refused.status, refused.error["code"]) == (503, "sleeping")
        assert int(refused.headers["retry-after"]) > 0
        assert told(running, "/wake_up").status == 200
        assert states(running)["awake"] == 1
        assert running.get("/ready").status == 200
        assert running.post("/v1/completions", QUESTION).status == 200


def test_requests_in_flight_are_ended_before_a_model_sleeps(tokenizer: Tokenizer) -> None:
    with Stepped(tokenizer, with_settings(admin_keys=("root",))) as server:
        endless = QUESTION | {"max_tokens": 250, "ignore_eos": True, "stream": True}
        with server.begin("/v1/completions", endless) as stream:
            server.control.permits.release(1)
            while not stream.line().startswith(b"data: "):
                pass
            with ThreadPoolExecutor(1) as pool:
                asleep = pool.submit(told, server, "/sleep")
                lines = [b""]
                while b"[DONE]" not in lines[-1]:
                    lines.append(stream.line())
                server.control.go.set()  # the step under way ends, if one is
                assert asleep.result().status == 200
            assert b"was put to sleep" in b"".join(lines)
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}


def waiting(server: Running, mode: str = "wait") -> Open:
    """An operator who waits until the model has no more work, and then has it sleep."""
    head = f"POST /sleep?mode={mode} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer root\r\n\r\n"
    operator = server.begin_raw(head.encode())
    while server.get("/ready").json()["status"] != "sleeping":
        pass
    return operator


def test_who_waits_until_a_model_sleeps_waits_for_no_later_request(tokenizer: Tokenizer) -> None:
    with Stepped(tokenizer, with_settings(admin_keys=("root",))) as server:
        with server.begin("/v1/completions", QUESTION | {"ignore_eos": True}) as early:
            with waiting(server) as operator:
                later = server.post("/v1/completions", QUESTION)
                assert (later.status, later.error["code"]) == (503, "sleeping")
                assert not server.get("/is_sleeping").json()["is_sleeping"]
                server.control.go.set()
                assert early.answer().json()["choices"][0]["finish_reason"] == "length"
                assert operator.answer().status == 200
        assert server.get("/is_sleeping").json()["is_sleeping"]


def test_who_waits_no_longer_puts_no_model_to_sleep(tokenizer: Tokenizer) -> None:
    with Stepped(tokenizer, with_settings(admin_keys=("root",))) as server:
        with server.begin("/v1/completions", QUESTION | {"ignore_eos": True}) as early:
            waiting(server).close()
            while server.get("/ready").json()["status"] != "ready":
                pass
            server.control.go.set()
            assert early.answer().status == 200
        assert server.post("/v1/completions", QUESTION).status == 200
        assert not server.get("/is_sleeping").json()["is_sleeping"]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_whose_requests_were_ended_sleeps_even_if_its_operator_leaves(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.setattr(fake, "RESOLVED", replace(fake.RESOLVED, pipeline_parallel_size=stages))
    with Stepped(tokenizer, with_settings(admin_keys=("root",))) as server:
        endless = QUESTION | {"max_tokens": 250, "ignore_eos": True, "stream": True}
        with server.begin("/v1/completions", endless) as stream:
            server.control.permits.release(1)
            while not stream.line().startswith(b"data: "):
                pass
            waiting(server, "abort").close()
            while b"[DONE]" not in stream.line():
                pass
            server.control.go.set()
        while not server.get("/is_sleeping").json()["is_sleeping"]:
            pass


@pytest.mark.parametrize("query", ["level=3", "level=", "level=x", "mode=keep", "level=1&mode="])
def test_a_wrong_query_is_refused_and_changes_nothing(running: Running, query: str) -> None:
    refused = told(running, f"/sleep?{query}")
    assert refused.status == 400
    assert "must be" in refused.error["message"]
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ("/sleep?levle=2", 400, "levle"),
        ("/sleep?level=1&model=another", 404, "model"),
        ("/reset_prefix_cache?model=another", 404, "model"),
        ("/reset_prefix_cache?running=true", 400, "running"),
        ("/start_profile?seconds=5", 400, "seconds"),
        ("/update_weights?path=elsewhere", 400, "path"),
        ("/sleep?level=1&level=2", 400, "level"),
        ("/wake_up?tags=weights&tags=kv_cache&model=fake&model=fake", 400, "model"),
        ("/sleep?model=fake&model=fake", 400, "model"),
    ],
)
def test_a_command_that_was_not_meant_is_not_carried_out(
    running: Running, asked: str, status: int, param: str
) -> None:
    refused = told(running, asked)
    assert (refused.status, refused.error["param"]) == (status, param)
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/sleep", b'{"level": 2}', 400, "level"),
        ("/wake_up", b'{"tags": ["weights"]}', 400, "tags"),
        ("/reset_prefix_cache", b'{"reset_running_requests": true}', 400, "reset_running_requests"),
        ("/sleep", b"level=2", 400, None),
        ("/update_weights", b'{"path": "/tmp", "version": 3}', 400, "version"),
        ("/update_weights", b'{"path": "/tmp", "model": "another"}', 404, "model"),
    ],
)
def test_a_command_in_a_body_that_is_not_read_there_is_refused(
    running: Running, path: str, body: bytes, status: int, param: str | None
) -> None:
    refused = told(running, path, body)
    assert (refused.status, refused.error["param"]) == (status, param)
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_body_that_says_nothing_is_taken(running: Running) -> None:
    for body in (b"", b"{}"):
        assert told(running, "/sleep", body).status == 200
        assert told(running, "/wake_up", body).status == 200


def test_a_model_wakes_as_a_whole(running: Running) -> None:
    """vLLM wakes weights and pages apart, for which `tags` asks."""
    assert told(running, "/sleep?model=fake").status == 200
    for tags in ("tags=weights", "tags=kv_cache", "tags=", "tags=weights&tags=kv"):
        refused = told(running, f"/wake_up?{tags}")
        assert (refused.status, refused.error["param"]) == (400, "tags")
        assert running.get("/is_sleeping").json() == {"is_sleeping": True}
    assert told(running, "/wake_up?tags=weights&tags=kv_cache").status == 200
    assert running.get("/is_sleeping").json() == {"is_sleeping": False}


def test_weights_come_from_a_directory_that_is_there(
    running: Running, model_dir: pathlib.Path
) -> None:
    assert (
        told(running, "/update_weights", json.dumps({"path": str(model_dir)}).encode()).status
        == 200
    )
    assert running.control.weights == [str(model_dir)]
    for body in (b"{}", b'{"path": 3}', b'{"path": "/nowhere"}', b"[]", b"x"):
        assert told(running, "/update_weights", body).status == 400
    assert len(running.control.weights) == 1
