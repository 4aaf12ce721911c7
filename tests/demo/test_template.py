"""The tokenizer and the chat template, through the trainer's renderer and through transformers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import jaxllm.demo
from examples.demo_model.generate import corpus as plain_corpus
from examples.demo_model.pack import Filler, learnt
from examples.demo_model.skills.corpus import corpus
from examples.demo_model.tokenizer import TEMPLATE, build, render, renderer
from tests.demo.conversations import CHATS, SYSTEM, user

DEMO = pathlib.Path(jaxllm.demo.path())
GOLDENS = json.loads(pathlib.Path(__file__).with_name("goldens.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def transformers_tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_renders_and_encodes_as_its_golden(name, transformers_tokenizer):
    prompt = transformers_tokenizer.apply_chat_template(
        **CHATS[name], tokenize=False, add_generation_prompt=True
    )
    assert prompt == GOLDENS[name]["prompt"]
    assert transformers_tokenizer(prompt)["input_ids"] == GOLDENS[name]["prompt_ids"]


@pytest.mark.parametrize("name", CHATS)
def test_the_trainer_renders_as_transformers_does(name):
    chat = dict(CHATS[name])
    assert (
        renderer().render(messages=chat.pop("conversation"), **chat, add_generation_prompt=True)
        == GOLDENS[name]["prompt"]
    )


@given(text=st.text())
def test_any_text_survives_encoding(tokenizer, text):
    normalized = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == normalized


@given(number=st.integers(0, 10**12))
def test_digits_are_one_token_each(tokenizer, number):
    assert tokenizer.encode(str(number)).tokens == list(str(number))


def test_control_tokens_are_hidden_and_think_and_tool_tags_are_shown(
    tokenizer, transformers_tokenizer
):
    text = (
        "<|im_start|><think>a</think><tool_call>b</tool_call>"
        "<tool_response>c</tool_response><|im_end|><|endoftext|>"
    )
    ids = tokenizer.encode(text).ids
    assert len(ids) == 12 and max(ids) == 767
    assert (
        tokenizer.decode(ids)
        == transformers_tokenizer.decode(ids, skip_special_tokens=True)
        == text[12:-23]
    )


def test_thinking_is_off_unless_asked_for(transformers_tokenizer):
    def prompt(**kwargs):
        return transformers_tokenizer.apply_chat_template(
            [user("Hi")], tokenize=False, add_generation_prompt=True, **kwargs
        )

    assert (
        prompt()
        == prompt(enable_thinking=False)
        == prompt(enable_thinking=True) + "<think>\n\n</think>\n\n"
    )


def test_a_later_turn_begins_with_what_an_earlier_turn_saw_and_said(transformers_tokenizer):
    """Otherwise a prefix cache would be of no use in conversations."""
    first = [SYSTEM, user("What is 1 + 1?")]
    render_chat = transformers_tokenizer.apply_chat_template
    said = render_chat(first, tokenize=False, add_generation_prompt=True) + "2<|im_end|>\n"
    second = [*first, {"role": "assistant", "content": "2"}, user("Now add 3.")]
    assert render_chat(second, tokenize=False, add_generation_prompt=True).startswith(said)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_stands_first_once_even_with_tools(role):
    text = renderer().render(
        messages=[{"role": role, "content": "Be kind."}, user("Hi")], tools=[{"type": "function"}]
    )
    assert text.count("Be kind.") == 1 and text.startswith(
        "<|im_start|>system\nBe kind.\n\nTools:\n{"
    )


def test_no_messages_render_to_a_bare_prompt():
    assert (
        renderer().render(messages=[], add_generation_prompt=True, enable_thinking=True)
        == "<|im_start|>assistant\n"
    )


def test_a_tool_is_shown_as_it_was_trained_whatever_else_its_schema_says():
    def prompt(**parameters):
        tool = {"name": "calc", "description": "Calculate", "parameters": parameters}
        return renderer().render(
            messages=[user("Hi")], tools=[{"type": "function", "function": tool, "strict": True}]
        )

    plain = prompt(type="object", properties={"x": {"type": "string"}}, required=["x"])
    assert '"parameters": {"type": "object", "properties": {"x": {"type": "string"}}' in plain
    assert plain == prompt(
        properties={"x": {"title": "X", "type": "string"}},
        required=["x"],
        title="Calc",
        type="object",
        additionalProperties=False,
    )
    assert '"properties": {"x": {}}' in prompt(properties={"x": True})


def test_the_packaged_template_is_the_trained_one():
    assert (DEMO / "chat_template.jinja").read_text() == TEMPLATE.read_text()
    assert (
        json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
        == TEMPLATE.read_text()
    )


@pytest.mark.parametrize("of", [plain_corpus, corpus], ids=["plain", "mixed"])
def test_exactly_the_assistants_words_are_learnt(of, tokenizer):
    template = renderer()
    for sample in of(2, 300):
        text = render(template, sample)
        encoding = tokenizer.encode(text)
        mask = learnt(text, encoding, bool(sample.messages))
        said = tokenizer.decode(
            [i for i, kept in zip(encoding.ids, mask, strict=True) if kept],
            skip_special_tokens=False,
        )
        if not sample.messages:
            assert tokenizer.decode(encoding.ids[:1], skip_special_tokens=False) + said == text
            continue
        asked = max(i for i, m in enumerate(sample.messages) if m["role"] == "user")
        turns = [(i, m) for i, m in enumerate(sample.messages) if m["role"] == "assistant"]
        assert said.count("<|im_end|>") == len(turns) and said.endswith("<|im_end|>")
        for (i, turn), words in zip(turns, said.split("<|im_end|>"), strict=False):
            thought = turn.get("reasoning_content") and i > asked
            assert words.startswith("<think>\n" if thought else turn["content"])
            assert turn["content"] in words
        assert all(
            m["content"] not in said or m["role"] == "assistant"
            for m in sample.messages
            if len(m["content"]) > 60
        )


def test_packing_keeps_every_document_whole_and_numbered():
    filler = Filler(8)
    for size in (3, 4, 5, 8, 11):
        filler.add(np.full(size, size, np.int16), np.ones(size, bool))
    (rows,) = filler.rows()
    assert rows.token_NT.tolist() == [[3] * 3 + [4] * 4 + [0], [5] * 5 + [0] * 3, [8] * 8, [11] * 8]
    assert rows.segment_NT.tolist() == [
        [1, 1, 1, 2, 2, 2, 2, 0],
        [1] * 5 + [0] * 3,
        [1] * 8,
        [1] * 8,
    ]
    assert rows.position_NT.tolist()[0] == [0, 1, 2, 0, 1, 2, 3, 0]


def test_a_document_joins_the_fullest_row_with_room_or_opens_the_shortest_that_fits():
    filler = Filler(4, 8)
    for size in (6, 3, 2, 1, 5):
        filler.add(np.full(size, size, np.int16), np.ones(size, bool))
    short, long = filler.rows()
    assert short.token_NT.tolist() == [[3, 3, 3, 1]]
    assert long.token_NT.tolist() == [[6] * 6 + [2] * 2, [5] * 5 + [0] * 3]
    assert long.learn_NT.sum() == 13


def test_no_token_is_lost_in_packing():
    filler, rng = Filler(16, 32, 64), np.random.default_rng(1)
    sizes = rng.integers(1, 65, 500)
    for size in sizes:
        filler.add(np.full(size, 1, np.int16), np.ones(size, bool))
    rows = filler.rows()
    assert sum(int(one.token_NT.sum()) for one in rows) == sizes.sum()
    assert sum(one.token_NT.size for one in rows) < 1.2 * sizes.sum()


@pytest.mark.slow
def test_the_packaged_tokenizer_is_what_the_builder_builds(tokenizer):
    assert build().to_str(pretty=True) == tokenizer.to_str(pretty=True)
