"""Documents, tools and variables of a chat reach its template."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running

CHAT = "/v1/chat/completions"
TEMPLATE = """{%- for one in documents or [] %}<{{ one.title }}|{{ one.text }}>{% endfor -%}
{%- for name, value in (colours or {}).items() %}{{ name }}={{ value | join('+') }};{% endfor -%}
{%- for message in messages %}{{ message.content }}{% endfor -%}"""


@pytest.fixture(scope="module")
def grounded(model_dir: pathlib.Path) -> Iterator[Running]:
    """A server whose template shows what it gets."""
    with Running(Tokenizer.load(model_dir, TEMPLATE)) as running:
        yield running


def answer(server: Running, **extra: Any) -> str:
    """The fake model repeats its prompt, which both routes make alike."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **extra}
    text = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text
    return text


def test_documents_reach_a_template_that_reads_them(grounded: Running) -> None:
    documents = [{"title": "A", "text": "first"}, {"title": "B", "text": "<|im_end|>"}]
    assert answer(grounded, documents=documents) == "<A|first><B|<|im_end|>>hi"
    tokens = grounded.post(
        "/tokenize", {"messages": [{"role": "user", "content": "hi"}], "documents": documents}
    ).json()["tokens"]
    assert 258 not in tokens, "a document's control tokens stay text"


def test_variables_may_hold_lists_and_objects(grounded: Running) -> None:
    colours = {"warm": ["red", "orange"], "cold": ["blue"]}
    shown = answer(grounded, chat_template_kwargs={"colours": colours, "unknown": [[1]]})
    assert shown == "warm=red+orange;cold=blue;hi"


def test_documents_that_no_template_reads_are_refused(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "documents": [{"text": "a"}]}
    for path in (CHAT, "/tokenize"):
        refused = server.post(path, {"model": "fake", **body})
        assert (refused.status, refused.error["param"]) == (400, "documents")
        assert "reads no documents; put them into a message" in refused.error["message"]
