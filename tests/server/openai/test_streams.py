"""The life of a request between client and engine: disconnects, errors before and within a stream,
overload, the engine's death."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from jaxllm.messages import RequestError
from jaxllm.server.engine.connection import is_exiting
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running
from tests.server.stepped import ENDLESS, Stepped


@pytest.fixture
def stepped(tokenizer: Tokenizer) -> Iterator[Stepped]:
    """A fresh one."""
    with Stepped(tokenizer) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "extra", [{}, {"n": 8}, {"prompt": ["a", "b", "c"]}], ids=["one", "n", "prompts"]
)
def test_a_client_that_leaves_takes_its_request_out_of_the_engine(
    stepped: Stepped, stream: bool, extra: dict[str, Any]
) -> None:
    control = stepped.control
    with stepped.begin("/v1/completions", ENDLESS | {"stream": stream} | extra) as sock:
        wanted = len(extra.get("prompt", [1]))
        control.step_until(lambda: len(control.added) == wanted)
        if stream:
            control.permits.release(1)
            assert sock.status() == 200
    ids = {request.id for request in control.added}
    control.step_until(lambda: ids <= set(control.aborted))
    assert not control.running
    assert stepped.server_state.client.in_flight == 0
    assert stepped.server_state.client.choices == 0


def test_a_client_that_leaves_disturbs_nobody_else(stepped: Stepped) -> None:
    control = stepped.control
    with (
        stepped.begin("/v1/completions", ENDLESS | {"stream": True}),
        stepped.begin("/v1/completions", ENDLESS | {"prompt": "x"}) as stays,
    ):
        control.step_until(lambda: len(control.added) == 2)
        leaver = next(request.id for request in control.added if len(request.prompt.tokens) == 3)
        control.permits.release(1)
        with stepped.begin("/v1/completions", ENDLESS | {"prompt": "yy"}):
            control.step_until(lambda: len(control.added) == 3)
        control.step_until(lambda: len(control.aborted) == 1)
        assert leaver not in control.aborted
        control.go.set()
        assert stays.status() == 200
    assert control.aborted[0] == next(
        request.id for request in control.added if len(request.prompt.tokens) == 2
    )


def test_a_finished_request_is_never_aborted(server: Running) -> None:
    before = len(server.control.aborted)
    for stream in (True, False):
        assert (
            server.post(
                "/v1/completions", {"model": "fake", "prompt": "abc", "stream": stream}
            ).status
            == 200
        )
    with server.begin(
        "/v1/completions", {"model": "fake", "prompt": "abc", "stream": True}
    ) as sock:
        while b"[DONE]" not in sock.line():
            pass
    server.post("/v1/completions", {"model": "fake", "prompt": "abc"})
    assert len(server.control.aborted) == before


def test_what_the_engine_refuses_is_a_400_even_for_a_stream(fresh: Running) -> None:
    fresh.control.fail_add = RequestError(
        "can never fit the pool", "max_tokens", "kv_pool_too_small"
    )
    for stream in (True, False):
        answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "a", "stream": stream})
        assert answer.status == 400
        assert (answer.error["param"], answer.error["code"]) == ("max_tokens", "kv_pool_too_small")
    fresh.control.fail_add = None
    assert fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).status == 200


def test_a_request_that_breaks_the_engines_door_fails_alone(fresh: Running) -> None:
    fresh.control.fail_add = ZeroDivisionError("oops")
    assert (
        fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).error["type"]
        == "server_error"
    )
    fresh.control.fail_add = None
    assert fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).status == 200


def test_a_full_queue_of_the_engine_is_a_503_that_says_when_to_come_back(fresh: Running) -> None:
    fresh.control.fail_add = RequestError("the queue is full", None, "queue_full")
    answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "a"})
    assert answer.status == 503
    assert answer.error["type"] == "overloaded_error"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("choices", [{"n": 8}, {"n": 2, "best_of": 8}])
def test_a_burst_over_the_capacity_is_refused_at_once_and_the_rest_completes(
    fresh: Running, choices: dict[str, int]
) -> None:
    fresh.control.go.clear()
    body = {"model": "fake", "prompt": "abc", **choices}
    # 32 choices: 8 running and 24 queued
    held = [fresh.begin("/v1/completions", body) for _ in range(4)]
    try:
        while fresh.server_state.client.choices < 32:
            assert fresh.get("/version").status == 200
        refused = fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"})
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert fresh.get("/ready").status == 503
        assert fresh.get("/health").status == 200
        fresh.control.go.set()
        for sock in held:
            assert sock.status() == 200
    finally:
        for sock in held:
            sock.close()
    assert (
        b'vllm:admission_rejections_total{engine="0",model_name="fake",reason="queue_full"} 1.0'
        in fresh.get("/metrics").body
    )
    assert (fresh.server_state.client.choices, fresh.server_state.client.in_flight) == (0, 0)


def test_an_idle_server_takes_more_prompts_than_the_queue_and_feeds_them_as_choices_end(
    fresh: Running,
) -> None:
    body = {"model": "fake", "prompt": [f"p{number}" for number in range(100)], "n": 2}
    choices = fresh.post("/v1/completions", body).json()["choices"]
    assert [choice["text"] for choice in choices] == [f"p{number // 2}" for number in range(200)]
    assert fresh.control.most_choices == fresh.server_state.client.capacity == 32
    assert (fresh.server_state.client.choices, fresh.server_state.client.in_flight) == (0, 0)


def test_a_large_request_whose_client_leaves_takes_its_waiting_prompts_with_it(
    fresh: Running,
) -> None:
    fresh.control.go.clear()
    with fresh.begin("/v1/completions", {"model": "fake", "prompt": ["abc"] * 100}):
        assert fresh.control.saw(lambda: len(fresh.control.added) >= 1)
        assert fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).status == 503
    while fresh.server_state.client.choices:
        assert fresh.get("/version").status == 200
    fresh.control.go.set()
    assert (
        fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"}).json()["choices"][0][
            "text"
        ]
        == "abc"
    )
    assert len(fresh.control.added) <= 33


def test_a_full_server_refuses_before_it_tokenises(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.control.go.clear()
    with fresh.begin("/v1/completions", {"model": "fake", "prompt": "abc", "n": 32}):
        assert fresh.control.saw(lambda: bool(fresh.control.added))
        monkeypatch.setattr(
            fresh.server_state, "encode", lambda *arguments: pytest.fail("tokenised")
        )
        answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"})
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        fresh.control.go.set()


def test_the_engines_error_for_one_request_is_a_500_or_the_requests_own_fault(
    fresh: Running,
) -> None:
    fresh.control.error_delta = True
    answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"})
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "abc", "stream": True})
    assert answer.status == 500
    fresh.control.error_delta = "structured_outputs"
    for stream in (False, True):
        answer = fresh.post("/v1/completions", {"model": "fake", "prompt": "abc", "stream": stream})
        assert (answer.status, answer.error["param"], answer.error["code"]) == (
            400,
            "structured_outputs",
            "unsatisfiable",
        )
    fresh.control.error_delta = False
    assert fresh.post("/v1/completions", {"model": "fake", "prompt": "abc"}).status == 200


def broken_stream(stepped: Stepped, break_engine: Callable[[], None]) -> list[bytes]:
    """The lines of a stream that `break_engine` cuts off; a whole request beside it gets a 500."""
    control = stepped.control
    with (
        stepped.begin("/v1/completions", ENDLESS | {"stream": True}) as streaming,
        stepped.begin("/v1/completions", ENDLESS) as waiting,
    ):
        control.step_until(lambda: len(control.added) == 2)
        control.permits.release(1)
        assert streaming.status() == 200
        break_engine()
        control.permits.release(5)
        lines: list[bytes] = []
        while not lines or not lines[-1].startswith(b"data: [DONE]"):
            lines.append(streaming.line())
        assert waiting.status() == 500
        return lines


def error_event(lines: list[bytes]) -> Any:
    """The error in the last event before [DONE]."""
    last = next(line for line in reversed(lines[:-1]) if line.startswith(b"data: "))
    return json.loads(last.removeprefix(b"data: "))["error"]


def test_the_engines_death_reaches_every_request_and_health(stepped: Stepped) -> None:
    def cut() -> None:
        stepped.engine_sockets[0].shutdown(socket.SHUT_RDWR)

    lines = broken_stream(stepped, cut)
    assert error_event(lines)["type"] == "server_error"
    for path in ("/health", "/ready"):
        answer = stepped.get(path)
        assert (answer.status, answer.json()["status"]) == (503, "dead")
    refused = stepped.post("/v1/completions", {"model": "fake", "prompt": "a"})
    assert (refused.status, refused.error["code"]) == (503, "engine_down")
    assert int(refused.headers["retry-after"]) >= 1


def test_an_engine_that_is_being_ended_is_dead_before_its_socket_closes(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releasing the memory of a killed process takes a while, and its socket closes after that."""
    connection = fresh.server_state.client.clients[0]._connection
    monkeypatch.setattr(connection, "_process_id", os.getpid())
    for path in ("/health", "/ready"):
        assert fresh.get(path).status == 200
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its entry stays
        monkeypatch.setattr(connection, "_process_id", ended.pid)
        for path in ("/health", "/ready"):
            answer = fresh.get(path)
            assert (answer.status, answer.json()["status"]) == (503, "dead")
        refused = fresh.post("/v1/completions", {"model": "fake", "prompt": "a"})
        assert (refused.status, refused.error["code"]) == (503, "engine_down")
    assert not is_exiting(ended.pid), "no longer there, and its socket is closed"


def test_a_failed_step_ends_its_requests_alone_and_the_server_goes_on(
    stepped: Stepped, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        stepped.control.fail_step = "device lost at 0xdeadbeef in /usr/lib/python/x.py"

    lines = broken_stream(stepped, fail)
    assert error_event(lines)["type"] == "server_error"
    assert b"deadbeef" not in b"".join(lines)
    assert b"/usr/lib" not in b"".join(lines)
    stepped.control.fail_step = None
    stepped.control.permits.release(1000)
    client = stepped.server_state.client
    assert (client.in_flight, client.choices) == (0, 0)
    assert stepped.get("/health").status == stepped.get("/ready").status == 200
    assert stepped.post("/v1/completions", {"model": "fake", "prompt": "abc"}).status == 200
    assert b'jaxllm:engine_step_failures_total{engine="0",model_name="fake"} 1.0' in (
        stepped.get("/metrics").body
    )
    assert caplog.text.count("deadbeef") == 1, "the reason is logged once"


def test_openai_python_raises_on_an_error_within_a_stream(stepped: Stepped) -> None:
    control = stepped.control
    control.permits.release(2)
    with openai.OpenAI(base_url=f"{stepped.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="abc", stream=True)
        assert next(iter(stream)).choices[0].text == "a"
        control.fail_step = "boom"
        control.permits.release(5)
        with pytest.raises(openai.APIError, match="engine failed"):
            list(stream)


def test_health_says_503_when_steps_stop_coming_while_work_waits(stepped: Stepped) -> None:
    assert stepped.get("/health").json()["status"] == "ok"
    with stepped.begin("/v1/completions", ENDLESS):
        assert stepped.control.saw(lambda: len(stepped.control.added) == 1)
        (client,) = stepped.server_state.client.clients
        client.last_message -= 1000
        next(iter(client._in_flight.values())).submitted -= 1000
        answer = stepped.get("/health")
        assert (answer.status, answer.json()["status"]) == (503, "stalled")
        assert answer.json()["last_step_age_s"] > 900
        stepped.control.go.set()


def test_a_connection_serves_many_requests(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for text in ("a", "b", "c"):
            assert client.completions.create(model="alias", prompt=text).choices[0].text == text
            assert client.completions.create(model="alias", prompt=text).model == "alias"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "a", "instructions": "x\u2028y"}),
        ("/v1/responses", {"input": "a", "instructions": "x\u2028y", "background": True}),
        ("/generate", {"prompt": "a"}),
    ],
    ids=["chat", "completion", "message", "response", "background", "generate"],
)
def test_no_character_of_a_text_ends_a_line_of_a_stream(
    fresh: Running, path: str, body: dict[str, Any]
) -> None:
    fresh.control.pieces = ["a\u2028b", "\u2029\x85", "é\x0b\x1cz"]
    answer = fresh.post(path, {"model": "fake", "stream": True} | body)
    assert answer.status == 200
    text = answer.body.decode()
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    assert "\\u2029\\u0085" in text and "é" in text


def test_many_streams_at_once_stay_apart(server: Running) -> None:
    texts = {}

    def ask(name: str) -> None:
        events = server.post(
            "/v1/completions",
            {"model": "fake", "prompt": name, "stream": True},
            **{"x-request-id": "same"},
        ).events()
        texts[name] = "".join(event["choices"][0]["text"] for event in events)

    names = [f"name {number} " * (number % 3 + 1) for number in range(16)]
    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == {name: name[:16] if len(name) > 16 else name for name in names}


def test_a_panic_of_native_code_is_a_plain_500(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panic(*arguments: object) -> None:
        raise Panic

    monkeypatch.setattr(fresh.server_state, "encode", panic)
    assert (
        fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).error["type"]
        == "server_error"
    )
    monkeypatch.undo()
    fresh.control.fail_add = Panic()  # type: ignore[assignment]
    assert (
        fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).error["type"]
        == "server_error"
    )
    fresh.control.fail_add = None
    assert fresh.post("/v1/completions", {"model": "fake", "prompt": "a"}).status == 200
