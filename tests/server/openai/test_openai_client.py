"""openai-python, unchanged, against the server."""

from __future__ import annotations

import openai
import pytest

from tests.server.harness import Running


def test_a_chat_is_answered_with_text_and_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=20
    )
    assert reply.choices[0].message.role == "assistant"
    assert (
        reply.choices[0].message.content == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assist"
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 20
    assert reply.usage.prompt_tokens + 20 == reply.usage.total_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 16
    assert reply.id.startswith("chatcmpl-")
    assert reply.system_fingerprint


def test_a_streamed_chat_starts_with_the_role_and_ends_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=9,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "the same, please"}]
    whole = (
        client.chat.completions.create(model="fake", messages=messages).choices[0].message.content
    )  # type: ignore[arg-type]
    stream = client.chat.completions.create(model="fake", messages=messages, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


def test_the_stream_helper_of_the_client_collects_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"


def test_completions_of_several_prompts_and_choices_are_numbered_prompt_by_prompt(
    client: openai.OpenAI,
) -> None:
    reply = client.completions.create(model="fake", prompt=["abc", "xyz"], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["abc", "abc", "xyz", "xyz"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 4
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 12)


def test_a_streamed_completion_of_several_choices_keeps_them_apart(client: openai.OpenAI) -> None:
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="fake", prompt=["abc", "wxyz"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abc", "abc", "wxyz", "wxyz"]


def test_token_ids_are_prompts_too(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt=[104, 105]).choices[0].text == "hi"
    reply = client.completions.create(model="fake", prompt=[[104], [105, 106]])
    assert [choice.text for choice in reply.choices] == ["h", "ij"]


def test_completions_generate_sixteen_tokens_unless_told(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="abc", extra_body={"ignore_eos": True, "max_tokens": None}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_max_tokens_beyond_the_context_is_clamped(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="abc", max_tokens=100_000, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    assert reply.usage.total_tokens == 256


def test_a_chat_without_max_tokens_may_fill_the_context(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "go on"}]
    reply = client.chat.completions.create(
        model="fake", messages=messages, extra_body={"ignore_eos": True}
    )  # type: ignore[arg-type]
    assert reply.usage is not None
    assert reply.usage.total_tokens == 256


def test_a_stop_string_is_reported(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="fake", prompt="abc|def", stop=["|", "never"]).choices[
        0
    ]
    assert (choice.text, choice.finish_reason, choice.model_extra) == (
        "abc",
        "stop",
        {"stop_reason": "|"},
    )


def test_completion_logprobs_have_the_four_lists(client: openai.OpenAI) -> None:
    found = client.completions.create(model="fake", prompt="aé", logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "\ufffd", "\ufffd"]
    assert found.token_logprobs == [-0.25] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {"a": -0.25, "\x00": -9999.0}


def test_streamed_completion_logprobs_continue_their_offsets(client: openai.OpenAI) -> None:
    offsets: list[int] = []
    for chunk in client.completions.create(model="fake", prompt="abcd", logprobs=0, stream=True):
        found = chunk.choices[0].logprobs
        assert found is not None
        assert found.top_logprobs == [{found.tokens[0]: -0.25}]  # type: ignore[index]
        offsets += found.text_offset or []
    assert offsets == [0, 1, 2, 3]


def test_chat_logprobs_carry_the_true_bytes_of_half_characters(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "é"}]
    reply = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, top_logprobs=2
    )  # type: ignore[arg-type]
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    joined = bytes(byte for at in content for byte in at.bytes or [])
    assert "é".encode() in joined
    assert all(len(at.top_logprobs) == 2 and at.top_logprobs[0].token == at.token for at in content)
    assert content[0].top_logprobs[1].logprob == -9999.0


def test_chat_logprobs_without_top_have_no_alternatives(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a"}]
    reply = client.chat.completions.create(
        model="fake", messages=messages, logprobs=True, max_tokens=1
    )  # type: ignore[arg-type]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].top_logprobs == []


def test_models_are_listed_and_found_by_every_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    card = client.models.retrieve("alias")
    assert (card.id, card.object, card.model_extra and card.model_extra["max_model_len"]) == (
        "alias",
        "model",
        256,
    )
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/name")
    assert error.value.code == "model_not_found"


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-9", prompt="a")
    assert (error.value.code, error.value.param, error.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )


def test_continuous_usage_counts_up_on_every_chunk(server: Running) -> None:
    body = {
        "model": "fake",
        "prompt": "abc",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    counts = [
        event["usage"]["completion_tokens"]
        for event in server.post("/v1/completions", body).events()
    ]
    assert counts == [1, 2, 3, 3]


def test_usage_is_null_on_the_chunks_before_the_last(server: Running) -> None:
    body = {
        "model": "fake",
        "prompt": "abc",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = server.post("/v1/completions", body).events()
    assert [event["usage"] is None for event in events] == [True, True, True, False]


def test_without_stream_options_no_chunk_speaks_of_usage(server: Running) -> None:
    events = server.post(
        "/v1/completions", {"model": "fake", "prompt": "abc", "stream": True}
    ).events()
    assert all("usage" not in event for event in events)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
