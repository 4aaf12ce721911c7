"""Stored responses: retrieved, listed, deleted, and seen by their owner alone."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxllm.server.responses import create
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings
from tests.server.responses.conftest import Script

PATH = "/v1/responses"
HI = {"model": "fake", "input": "hi"}


def test_a_response_can_be_retrieved_as_it_was(client, script: Script):
    script("Hello.")
    made = client.responses.create(**HI)
    assert client.responses.retrieve(made.id) == made
    with client.responses.stream(**HI) as stream:
        streamed = stream.get_final_response()
    again = client.responses.retrieve(streamed.id)
    assert (again.output_text, again.usage) == (streamed.output_text, streamed.usage)


def test_a_deleted_response_is_gone(client, script: Script):
    script("Hello.")
    made = client.responses.create(**HI)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**HI, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_is_not_stored_on_request(client, script: Script):
    script("Hello.")
    made = client.responses.create(**HI, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_server_without_a_store_says_so(tokenizer: Tokenizer):
    with Running(tokenizer, with_settings(response_store=False)) as server:
        made = server.post(PATH, HI | {"store": True}).json()
        assert (made["status"], made["store"]) == ("completed", False)
        assert server.get(f"{PATH}/{made['id']}").error["code"] == "response_not_found"
        reply = server.post(PATH, HI | {"previous_response_id": made["id"]})
        assert (reply.status, reply.error["code"]) == (404, "previous_response_not_found")
        assert server.post(PATH, HI | {"background": True}).error["param"] == "background"


def test_a_response_is_seen_by_its_key_alone(tokenizer: Tokenizer):
    keys: Any = {"ann": {"authorization": "Bearer ann"}, "bob": {"authorization": "Bearer bob"}}
    with Running(tokenizer, with_settings(api_keys=("ann", "bob"))) as server:
        made = server.post(PATH, HI, **keys["ann"]).json()
        item = made["output"][0]["id"]
        assert server.get(f"{PATH}/{made['id']}", **keys["ann"]).json() == made
        assert server.get(f"{PATH}/{made['id']}", **keys["bob"]).status == 404
        assert server.request("DELETE", f"{PATH}/{made['id']}", None, keys["bob"]).status == 404
        follow = HI | {"previous_response_id": made["id"]}
        assert server.post(PATH, follow, **keys["bob"]).status == 404
        assert server.post(PATH, follow, **keys["ann"]).status == 200
        ann, bob = ({"authorization": "Bearer none", "x-api-key": key} for key in ("ann", "bob"))
        assert server.get(f"{PATH}/{made['id']}", **ann).json() == made
        made = server.post(PATH, HI, **ann).json()
        assert server.get(f"{PATH}/{made['id']}", **bob).status == 404
        refers = HI | {"input": [{"type": "item_reference", "id": item}]}
        assert server.post(PATH, refers, **keys["bob"]).status == 404
        assert server.post(PATH, refers, **keys["ann"]).status == 200


def test_a_small_request_cannot_have_more_read_than_a_limit(
    server: Running, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("Hello.")
    first = server.post(PATH, HI).json()
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    monkeypatch.setattr(create, "MAX_HISTORY", 1000)
    follow = HI | {"previous_response_id": first["id"]}
    second = server.post(PATH, follow).json()
    assert server.post(PATH, HI | {"input": [item]}).status == 200
    monkeypatch.setattr(create, "MAX_HISTORY", 500)
    for body, param in (
        ({"previous_response_id": second["id"]}, "previous_response_id"),
        ({"input": [item] * 9}, "input"),
    ):
        answer = server.post(PATH, HI | body)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert answer.error["code"] == "context_length_exceeded"


def test_ids_cannot_be_guessed(client, script: Script):
    script("x")
    ids = {client.responses.create(**HI).id for _ in range(3)}
    assert len(ids) == 3
    assert all(len(id) >= len("resp_") + 32 for id in ids)


def test_input_items_are_listed_page_by_page(client, script: Script):
    script("Hello.")
    texts = [str(number) for number in range(5)]
    first = client.responses.create(
        model="fake", input=[{"role": "user", "content": text} for text in texts]
    )
    second = client.responses.create(**HI, previous_response_id=first.id)
    listed = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert listed.has_more
    found = list(listed)  # the client turns the pages
    assert [item.content[0].text for item in found] == [*texts, "Hello.", "hi"]
    assert len({item.id for item in found}) == len(found)
    latest = client.responses.input_items.list(second.id)
    assert [item.id for item in latest] == [item.id for item in reversed(found)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
    ],
)
def test_bad_pages_are_refused(server: Running, script: Script, query, param):
    script("x")
    made = server.post(PATH, HI).json()
    reply = server.get(f"{PATH}/{made['id']}/input_items?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


def test_only_background_responses_are_cancelled_or_streamed_later(server, client, script: Script):
    script("x")
    made = client.responses.create(**HI)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    for query in ("stream=true", "stream=true&starting_after=0"):
        assert server.get(f"{PATH}/{made.id}?{query}").error["param"] == "stream"
    assert server.get(f"{PATH}/{made.id}?stream=maybe").error["param"] == "stream"
