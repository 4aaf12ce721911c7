"""What a chat gives its template; formats that a response template shows."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.parsing.formats import Formats, find_formats, format_name
from jaxllm.server.parsing.registry import tool_formats
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


THOUGHTS = """{%- for message in messages -%}
{%- if message.tool_calls and message.content and message.thinking -%}
{{ raise_exception("Cannot pass both") }}
{%- endif -%}
{{ message.content }}({{ message.reasoning_content }}|{{ message.thinking or '' }})
{%- endfor -%}"""


def test_a_text_and_a_thought_beside_calls_are_no_error(model_dir: pathlib.Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = {"role": "assistant", "tool_calls": [call], "reasoning": "so"}
    messages = [
        {"role": "user", "content": "hi"},
        calls,
        calls | {"content": "text"},
        {"role": "assistant", "content": "text", "reasoning": "well"},
    ]
    with Running(Tokenizer.load(model_dir, THOUGHTS)) as server:
        assert answer(server, messages=messages) == "hi(|)(so|so)text(so|)text(well|well)"


def test_documents_that_no_template_reads_are_refused(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "documents": [{"text": "a"}]}
    for path in (CHAT, "/tokenize"):
        refused = server.post(path, {"model": "fake", **body})
        assert (refused.status, refused.error["param"]) == (400, "documents")
        assert "reads no documents; put them into a message" in refused.error["message"]


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"(?:(?:</function>)*)*x?\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}


def test_a_response_template_shows_the_formats_that_the_chat_template_does_not(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert find_formats("auto", "auto", Tokenizer.load(tmp_path).format_signs) == Formats()
    config = tmp_path / "tokenizer_config.json"
    given = json.loads(config.read_text()) | {"response_template": RESPONSE_TEMPLATE}
    config.write_text(json.dumps(given))
    signs = Tokenizer.load(tmp_path).format_signs
    found = find_formats("auto", "auto", signs)
    assert format_name(found.reasoning) == "qwen3" and format_name(found.tools) == "qwen3_coder"
    assert find_formats("auto", "hermes", signs).tools is tool_formats()["hermes"]
    assert signs is not None and "<|im_end|>|<|endoftext|>" in signs, "escapes of regexes are gone"
