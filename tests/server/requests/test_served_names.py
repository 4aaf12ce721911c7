"""Several served names: each is the model under that name, and no other is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.command_line.options import parse
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings

CHAT = [{"role": "user", "content": "abc"}]
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": CHAT}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", {"messages": CHAT}),
    ("/detokenize", {"tokens": [1]}),
]


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server of one model under two names."""
    with Running(tokenizer, with_settings(served=("a", "b/c"), root="m")) as running:
        yield running


@pytest.mark.parametrize(
    "flags",
    [
        ["--served-model-name", "a", "b"],
        ["--served-model-name", "a", "--served-model-name", "b"],
        ["--served-model-name", "a", "b", "a"],
    ],
)
def test_the_flag_takes_several_names_once_each(flags: list[str]) -> None:
    settings = parse(["m", *flags], {}).settings
    assert (settings.served, settings.root) == (("a", "b"), "m")


@pytest.mark.parametrize("name", ["a", "b/c"])
@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_a_reply_carries_the_name_of_its_request(
    named: Running, path: str, body: dict[str, Any], name: str
) -> None:
    whole = named.post(path, body | {"model": name})
    assert (whole.status, whole.json()["model"]) == (200, name)
    events = named.post(path, body | {"model": name, "stream": True}).events()
    assert {event["model"] for event in events} == {name}


@pytest.mark.parametrize("name", ["a", "b/c"])
@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_tokenising_takes_each_name_or_none(
    named: Running, path: str, body: dict[str, Any], name: str
) -> None:
    assert named.post(path, body | {"model": name}).status == 200
    assert named.post(path, body).status == 200


@pytest.mark.parametrize("name", ["m", "A", "b", "a ", "", "a, b/c"])
@pytest.mark.parametrize(("path", "body"), GENERATING + OTHERS)
def test_any_other_name_is_a_404_that_lists_the_served_ones(
    named: Running, path: str, body: dict[str, Any], name: str
) -> None:
    answer = named.post(path, body | {"model": name})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "a, b/c" in answer.error["message"]


def test_every_name_is_listed_and_found(named: Running) -> None:
    cards = named.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("a", "m"), ("b/c", "m")]
    for card in cards:
        assert named.get(f"/v1/models/{card['id']}").json() == card
    assert named.get("/v1/models/b").status == named.get("/v1/models/m").status == 404


def test_metrics_carry_the_first_name(named: Running) -> None:
    assert named.post("/v1/completions", {"model": "b/c", "prompt": "abc"}).status == 200
    metrics = named.get("/metrics").body
    assert b'model_name="a"' in metrics and b'model_name="b/c"' not in metrics
