"""The renderer makes the ids that transformers makes in one step, and marks what users write."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import orjson
import pytest

from jaxllm.chat_template import TemplateError, TemplateInput
from jaxllm.server.rendering import worker
from jaxllm.server.rendering.worker import Renderer, answer
from jaxllm.tokenizer import Tokenizer
from tests.demo.conversations import CHATS
from tests.server.conftest import TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <|im_end|> city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
GROUNDED = """{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for one in documents or [] %}<doc>{{ one.title }}: {{ one['text'] }}</doc>{% endfor -%}
{%- for message in messages %}[{{ message.role }}]{{ message.content | trim }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- generation %}{{ eos_token }}{% endgeneration %}{% endfor -%}
{%- if add_generation_prompt %}[assistant]{{ style | default('plain') }}{% endif -%}
{{ extra | tojson if extra is defined }}"""
TEMPLATES: dict[str, Any] = {
    "chatml": TEMPLATE,
    "grounded": GROUNDED,
    "named": {"default": TEMPLATE, "tool_use": GROUNDED},
}
WORDS = (
    "hello, Grüße 你好 <|im_end|> <|im_start|>system\n <think> </think> \U000f0000 \U000f0001 "
    "<|endoftext|>\n\n {{ x }} <tool_call> <|im_ <|im_start|><|im_end|> \u0000 😀"
).split(" ")


@pytest.fixture(scope="module")
def demo(repo: pathlib.Path) -> pathlib.Path:
    return repo / "jaxllm" / "demo"


@pytest.fixture(scope="module")
def built_in(demo: pathlib.Path) -> tuple[Tokenizer, Renderer]:
    """The built-in model's tokenizer, and what renders for it."""
    tokenizer = Tokenizer.load(demo)
    return tokenizer, renderer_of(tokenizer)


def renderer_of(tokenizer: Tokenizer) -> Renderer:
    """As the process makes it from its first line."""
    return Renderer(orjson.loads(orjson.dumps(tokenizer.template_facts())))


def text_of(renderer: Renderer, conversation: TemplateInput, sanitize: bool = True) -> str:
    arguments = orjson.loads(orjson.dumps(conversation.arguments(renderer.chat_template)))
    job = {"arguments": arguments, "sanitize": sanitize, "max_chars": 1 << 20}
    reply = answer(job, renderer)
    if "error" in reply:
        raise TemplateError(reply["error"])
    return reply["text"]


def random_conversation(rng: random.Random, grounded: bool) -> TemplateInput:
    """A conversation with anything in it that may matter."""

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 9)))

    messages: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 6)):
        message: dict[str, Any] = {"role": rng.choice(["system", "user", "assistant"])}
        message["content"] = text()
        if message["role"] == "assistant" and rng.random() < 0.5:
            message["reasoning_content"] = text()
        messages.append(message)
        if message["role"] == "assistant" and rng.random() < 0.4:
            function = {"name": "weather", "arguments": {"city": text(), "days": [1, 2.5, None]}}
            message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            messages.append({"role": "tool", "tool_call_id": "1", "content": text()})
    continues = rng.random() < 0.2 and "tool_calls" not in messages[-1]
    return TemplateInput(
        messages=messages,
        tools=[TOOL] if rng.random() < 0.5 else None,
        documents=[{"title": text(), "text": text()}] if grounded and rng.random() < 0.5 else None,
        add_generation_prompt=not continues and rng.random() < 0.8,
        continue_final_message=continues,
        template_kwargs={
            "enable_thinking": rng.random() < 0.5,
            "style": text(),
            "extra": {"list": [text(), 1, True, None], "object": {"key": text()}},
            "never_read": 1,
        },
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("sanitize", [True, False])
@pytest.mark.parametrize("model", ["bytes", "demo"])
def test_ids_of_rendered_conversations_are_those_made_in_process(
    model_dir: pathlib.Path, demo: pathlib.Path, model: str, sanitize: bool, template: str
) -> None:
    tokenizer = Tokenizer.load(demo if model == "demo" else model_dir)
    tokenizer.hf.chat_template = TEMPLATES[template]
    renderer, rng = renderer_of(tokenizer), random.Random(0)
    refused = 0
    for _ in range(60):
        conversation = random_conversation(rng, grounded=template != "chatml")
        try:
            want: list[int] | str = tokenizer.chat(conversation, sanitize=sanitize)
        except TemplateError as error:
            want = str(error)
        try:
            text = text_of(renderer, conversation, sanitize)
            found: list[int] | str = tokenizer.encode_chat(text, sanitize)
        except TemplateError as error:
            found = str(error)
        assert found == want
        refused += isinstance(want, str)
    assert refused < 30


@pytest.mark.parametrize("name", CHATS)
def test_every_feature_of_the_demo_models_template_is_rendered_as_in_process(
    built_in: tuple[Tokenizer, Renderer], name: str
) -> None:
    tokenizer, renderer = built_in
    given = dict(CHATS[name])
    fixed = {key: given.pop(key) for key in ("tools", "documents") if key in given}
    conversation = TemplateInput(messages=given.pop("conversation"), **fixed, template_kwargs=given)
    ids = tokenizer.encode_chat(text_of(renderer, conversation), True)
    assert ids == tokenizer.chat(conversation)


def test_control_tokens_of_tools_documents_and_arguments_stay_text(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer.hf)
    renderer = renderer_of(plain)
    renderer.chat_template = GROUNDED
    given = TemplateInput(
        messages=[{"role": "user", "content": "<|im_end|>"}],
        tools=[TOOL],
        documents=[{"title": "<|im_end|>", "text": "<|im_start|>"}],
        template_kwargs={"style": "<|im_start|>", "extra": {"a": ["<|im_end|>"]}},
    )
    ids = tokenizer.encode_chat(text_of(renderer, given), True)
    assert (ids.count(257), ids.count(258)) == (0, 1), "the template's own <|im_end|> alone"


@pytest.mark.parametrize("where", ["arguments", "tools", "documents", "kwargs"])
def test_a_control_token_in_a_members_name_is_refused(model_dir: pathlib.Path, where: str) -> None:
    tokenizer, bad = Tokenizer.load(model_dir, GROUNDED), {"<|im_end|>": 1, "title": "", "text": ""}
    call = {"type": "function", "function": {"name": "f", "arguments": bad}}
    messages = [{"role": "user", "content": "a"}]
    if where == "arguments":
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})  # type: ignore[dict-item]
    given = TemplateInput(
        messages=messages,
        tools=[bad] if where == "tools" else None,
        documents=[bad] if where == "documents" else None,
        template_kwargs={"extra": [bad]} if where == "kwargs" else {},
    )
    for render in (tokenizer.chat, lambda given: text_of(renderer_of(tokenizer), given)):
        with pytest.raises(TemplateError, match=r"'<\|im_end\|>'.*rename"):
            render(given)
    assert tokenizer.chat(given, sanitize=False)


def test_a_text_of_nothing_but_control_tokens_is_refused_beyond_the_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_MARKED", 10)
    renderer = renderer_of(tokenizer)
    given = [
        TemplateInput(messages=[{"role": "user", "content": "<|im_end|>" * n}]) for n in (10, 11)
    ]
    assert tokenizer.encode_chat(text_of(renderer, given[0]), True).count(258) == 1
    with pytest.raises(TemplateError, match="11 control tokens as text, the limit is 10"):
        text_of(renderer, given[1])


def test_text_that_is_no_unicode_is_the_templates_fault(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer)
    renderer.chat_template = "{{ '\\ud800' }}{{ messages[0].content }}"
    with pytest.raises(TemplateError, match="failed on the conversation"):
        text_of(renderer, TemplateInput(messages=[{"role": "user", "content": "a"}]))
