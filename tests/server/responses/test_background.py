"""Responses that are made without a connection: asked for later, followed, cancelled, failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxllm.server import app
from jaxllm.server.responses import store
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running
from tests.server.responses.conftest import Script
from tests.server.stepped import Stepped

PATH = "/v1/responses"
BEHIND = {"model": "fake", "input": "hi", "background": True}


def ended(client: openai.OpenAI, id: str) -> Any:
    """The response once it has ended; every look lets the server go on."""
    while (found := client.responses.retrieve(id)).status in ("queued", "in_progress"):
        pass
    return found


def events(body: bytes) -> list[Any]:
    """The events of a reply, whose names are checked."""
    found = []
    for one in body.decode().split("\n\n")[:-1]:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def stepped(tokenizer: Tokenizer) -> Iterator[Stepped]:
    """A server whose engine steps when told to."""
    with Stepped(tokenizer) as running:
        yield running


def test_a_response_is_made_behind(client, script: Script):
    script("Hello.")
    made = client.responses.create(**BEHIND)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    found = ended(client, made.id)
    assert (found.status, found.output_text) == ("completed", "Hello.")
    assert found.usage.output_tokens > 0
    follow = client.responses.create(model="fake", input="x", previous_response_id=made.id)
    assert follow.output_text == "Hello."


def test_a_response_is_in_progress_from_its_first_token_on(stepped: Stepped):
    stepped.control.pieces = ["x"] * 100
    made = stepped.post(PATH, BEHIND).json()
    stepped.control.step_until(lambda: len(stepped.control.running) == 1)
    status = made["status"]
    while status == "queued":
        stepped.control.permits.release(1)
        status = stepped.get(f"{PATH}/{made['id']}").json()["status"]
    assert status == "in_progress"


def test_a_stream_can_be_taken_up_again(server: Running, client, script: Script):
    script("Hello.", size=1)
    with client.responses.create(**BEHIND, stream=True) as stream:
        first = next(iter(stream))  # and the connection closes
    assert (first.type, first.response.status) == ("response.created", "queued")
    whole = events(server.get(f"{PATH}/{first.response.id}?stream=true").body)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert [event["type"] for event in whole[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert whole[-1]["type"] == "response.completed"
    rest = server.get(f"{PATH}/{first.response.id}?stream=true&starting_after=5")
    assert events(rest.body) == whole[6:]
    past = server.get(f"{PATH}/{first.response.id}?stream=true&starting_after=500")
    assert events(past.body) == []
    with client.responses.stream(response_id=first.response.id) as again:
        assert again.get_final_response().output_text == "Hello."


def test_a_follower_gets_events_as_they_come(server: Running, client, script: Script):
    script("Hello.", size=1)
    server.control.go.clear()
    try:
        with client.responses.create(**BEHIND, stream=True) as stream:
            seen = [next(iter(stream)).type]
            server.control.go.set()
            seen += [event.type for event in stream]
    finally:
        server.control.go.set()
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_cancelled(stepped: Stepped, stream):
    with openai.OpenAI(base_url=f"{stepped.url}/v1", api_key="none", max_retries=0) as client:
        made = client.responses.create(**BEHIND, stream=stream)
        id = next(iter(made)).response.id if stream else made.id
        stepped.control.step_until(lambda: len(stepped.control.running) == 1)
        found = client.responses.cancel(id)
        assert found.status == "cancelled"
        stepped.control.step_until(lambda: len(stepped.control.aborted) == 1)
        assert client.responses.cancel(id) == client.responses.retrieve(id) == found
        if stream:
            assert [event.type for event in made][-1] != "response.completed"


def test_a_deleted_response_is_no_longer_made(stepped: Stepped):
    id = stepped.post(PATH, BEHIND).json()["id"]
    stepped.control.step_until(lambda: len(stepped.control.running) == 1)
    assert stepped.request("DELETE", f"{PATH}/{id}").json()["deleted"] is True
    stepped.control.step_until(lambda: len(stepped.control.aborted) == 1)
    assert stepped.get(f"{PATH}/{id}").status == 404


def test_a_response_that_fails_says_why(server: Running, client, script: Script):
    script("Hello.")
    long = client.responses.create(**BEHIND | {"input": "x" * 300})
    found = ended(client, long.id)
    assert (found.status, found.error.code) == ("failed", "invalid_prompt")
    assert "maximum context length" in found.error.message
    with client.responses.create(**BEHIND | {"input": "x" * 300}, stream=True) as stream:
        last = [*stream][-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")


def test_a_running_response_cannot_be_continued(stepped: Stepped):
    id = stepped.post(PATH, BEHIND).json()["id"]
    reply = stepped.post(PATH, {"model": "fake", "input": "x", "previous_response_id": id})
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


def test_what_is_made_behind_counts_and_is_stopped_when_it_is_too_much(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "ResponseStore", lambda: store.ResponseStore(max_bytes=8_000))
    with Stepped(tokenizer) as server:
        server.control.pieces = ["x"] * 200
        with server.begin(PATH, BEHIND | {"stream": True}) as made:
            server.control.step_until(lambda: len(server.control.aborted) == 1)
            while not made.line().startswith(b"event: response.created"):
                pass
            first = json.loads(made.line().removeprefix(b"data: "))
        assert server.get(f"{PATH}/{first['response']['id']}").status == 404


def test_a_stream_that_fails_ends_with_what_there_is(stepped: Stepped):
    body = {"model": "fake", "input": "hi", "stream": True}
    with stepped.begin(PATH, body) as made:
        stepped.control.step_until(made.readable)
        stepped.control.fail_step = "device lost"
        stepped.control.permits.release(1)
        while not made.line().startswith(b"event: response.failed"):
            pass
        response = json.loads(made.line().removeprefix(b"data: "))["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["status"] == "incomplete"
    stepped.control.fail_step = None
    assert stepped.get(f"{PATH}/{response['id']}").json() == response
