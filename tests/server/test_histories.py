"""Every API gives a template the same history, in the form that it shows."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.chat_template import TemplateInput
from jaxllm.config import EngineConfig
from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.rendering import limits
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running
from tests.templates.families import TEMPLATES

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
DIGITS = "123456789012345678901234567890"
FAMILIES = [
    *("deepseek_v3", "deepseek_v31", "deepseek_r1", "llama_31", "qwen_35", "mistral_v3"),
    *("gpt_oss", "functionary", "nemotron", "qwen3_coder", "granite", "kimi_k2"),
]

LONG = EngineConfig(model="fake", max_model_len=8192)


def serving(model_dir: pathlib.Path, template: str) -> Running:
    return Running(Tokenizer.load(model_dir, template), config=LONG)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, model_dir: pathlib.Path) -> Iterator[Running]:
    """A server whose template behaves as a family's."""
    with serving(model_dir, TEMPLATES[request.param]) as server:
        server.server_state.formats = find_formats("none", "hermes", None)
        yield server


def text_of(server: Running, tokens: list[int]) -> str:
    tokenizer = server.server_state.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(tokens, False)


def prompt_of(server: Running, path: str, body: dict[str, Any]) -> str:
    """The prompt that a request makes."""
    answer = server.post(path, {"model": "fake", "max_tokens": 4} | body)
    assert answer.status == 200, answer.body
    return text_of(server, server.control.added[-1].prompt.tokens)


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


ARGUMENTS = {"callone01": f'{{"v": {DIGITS}}}', "calltwo02": '{"v": 7}'}
RESULTS = {"callone01": "found one", "calltwo02": "found two"}


def as_chat() -> dict[str, Any]:
    """The history as OpenAI's chats have it."""
    calls = [call(id, text) for id, text in ARGUMENTS.items()]
    results = [
        {"role": "tool", "tool_call_id": id, "content": text, "name": "look"}
        for id, text in RESULTS.items()
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I will.", "tool_calls": calls},
        *results,
        {"role": "system", "content": "Hurry."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Again."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}


def as_messages() -> str:
    """The same as Anthropic's messages have it."""
    used = [{"type": "tool_use", "id": id, "name": "look", "input": {"v": id}} for id in ARGUMENTS]
    results = [
        {"type": "tool_result", "tool_use_id": id, "content": text} for id, text in RESULTS.items()
    ]
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    body = {
        "model": "fake",
        "max_tokens": 4,
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "text", "text": "I will."}, *used]},
            {"role": "user", "content": results},
            {"role": "system", "content": "Hurry."},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "Again."},
        ],
        "tools": [tool],
    }
    text = json.dumps(body)
    for id, arguments in ARGUMENTS.items():
        text = text.replace(f'"input": {{"v": "{id}"}}', f'"input": {arguments}')
    return text


def as_responses() -> dict[str, Any]:
    """The same as items."""
    calls = [
        {"type": "function_call", "call_id": id, "name": "look", "arguments": text}
        for id, text in ARGUMENTS.items()
    ]
    results = [
        {"type": "function_call_output", "call_id": id, "output": text}
        for id, text in RESULTS.items()
    ]
    items = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I will."},
        *calls,
        *results,
        {"role": "developer", "content": "Hurry."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Again."},
    ]
    tools = [{"type": "function", **FUNCTION}]
    return {"instructions": "Be brief.", "input": items, "tools": tools}


def test_all_apis_render_a_history_alike_and_whole(family: Running) -> None:
    body = as_chat()
    prompt = prompt_of(family, CHAT, body)
    for text in ("Be brief.", "Look.", DIGITS, "7", *RESULTS.values(), "Hurry.", "Done.", "Again."):
        assert text in prompt
    answer = family.request("POST", "/v1/messages", as_messages().encode())
    assert answer.status == 200, answer.body
    assert text_of(family, family.control.added[-1].prompt.tokens) == prompt
    tokens = family.post("/tokenize", body).json()["tokens"]
    assert text_of(family, tokens) == prompt
    rendered = family.post(f"{CHAT}/render", {"model": "fake"} | body).json()["token_ids"]
    assert rendered == tokens
    items = as_responses() | {"model": "fake", "max_output_tokens": 4}
    answer = family.post("/v1/responses", items)
    assert answer.status == 200, answer.body
    shown = text_of(family, family.control.added[-1].prompt.tokens)
    for message in body["messages"]:
        message.pop("name", None)  # items have none
    assert shown == prompt_of(family, CHAT, body)
    tokenizer = family.server_state.tokenizer
    assert tokenizer is not None
    offline = TemplateInput(messages=body["messages"], tools=body["tools"])
    assert tokenizer.decode(tokenizer.chat(offline), False) == shown


CUT = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [call("callone01", '{"v": 77, "t": "cu')]},
    {"role": "tool", "tool_call_id": "callone01", "content": "not valid", "name": "look"},
]


def test_a_call_that_was_cut_ends_no_session(family: Running) -> None:
    prompt = prompt_of(family, CHAT, as_chat() | {"messages": CUT})
    assert "77" in prompt and "cu" in prompt and "not valid" in prompt
    for arguments in ("null", "[1]", "", None):
        messages = json.loads(json.dumps(CUT))
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        prompt = prompt_of(family, CHAT, as_chat() | {"messages": messages})
        assert "look" in prompt and "not valid" in prompt


CALLS = '<tool_call>\n{"name": "look", "arguments": {"v": 1}}\n</tool_call>'


@pytest.mark.parametrize("name", ["llama_31", "hermes"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_grammar_allows_as_many_calls_as_the_template_shows(
    model_dir: pathlib.Path, name: str, strict: bool
) -> None:
    tools = [{"type": "function", "function": FUNCTION | {"strict": strict}}]
    body = {"model": "fake", "messages": [{"role": "user", "content": "Look."}], "tools": tools}
    body |= {} if strict else {"tool_choice": "required"}
    with serving(model_dir, TEMPLATES[name]) as server:
        server.server_state.formats = find_formats("none", "hermes", None)
        server.control.pieces = [CALLS]
        grammars = []
        for parallel in (True, False):
            assert server.post(CHAT, body | {"parallel_tool_calls": parallel}).status == 200
            grammars.append(server.control.added[-1].grammar)
        assert None not in grammars
        assert (grammars[0] == grammars[1]) is (name == "llama_31")


def test_a_template_that_refuses_everything_is_served_with_its_error(
    model_dir: pathlib.Path,
) -> None:
    with serving(model_dir, "{{ raise_exception('never') }}") as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        for _ in range(2):
            answer = server.post(CHAT, body)
            assert (answer.status, answer.error["code"]) == (400, "chat_template_error")
            assert "never" in answer.error["message"]
        assert server.post("/v1/completions", {"model": "fake", "prompt": "hi"}).status == 200


def test_a_template_that_hangs_on_a_probe_is_served(
    model_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxllm.server.rendering.renders.PROBE_SECONDS", 0.2)
    assert limits.PROBE_SECONDS > 0.2
    hangs = (
        "{%- if messages | length > 1 -%}{%- for a in range(99999) -%}"
        "{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}{%- endif -%}"
        "{{ messages[0].content }}"
    )
    with serving(model_dir, hangs) as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        assert prompt_of(server, CHAT, body) == "hi"
        renders = server.server_state.renders
        assert renders is not None
        assert renders.traits_for(None).fault == "its probes took too much processor time"


def test_named_templates_are_each_given_their_form(
    model_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    named = {"default": TEMPLATES["gemma_2"], "tool_use": TEMPLATES["llama_31"]}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": listed}))
    with Running(Tokenizer.load(tmp_path), config=LONG) as server:
        server.server_state.formats = find_formats("none", "hermes", None)
        prompt = prompt_of(server, CHAT, as_chat())
        order = [prompt.index(text) for text in (DIGITS, "found one", '{"v": 7}', "found two")]
        assert order == sorted(order)
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "user", "content": "Now."},
        ]
        plain = prompt_of(server, CHAT, {"messages": messages})
        assert plain == "<bos><start>user\nBe brief.\n\nLook.\n\nNow.<end>\n<start>model\n"
