"""What replies tell of prompts: echo, log-probabilities of prompts on both endpoints, tokens named
by their ids; streamed as whole."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


def joined(client: openai.OpenAI, **options: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together: text, the four lists, the reason of the end."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(model="fake", stream=True, **options):
        for choice in chunk.choices:
            one = found.setdefault(
                choice.index, {"text": "", "logprobs": None, "finish_reason": None}
            )
            one["text"] += choice.text
            one["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                lists = choice.logprobs.model_dump()
                one["logprobs"] = {
                    name: [*(one["logprobs"] or {}).get(name, []), *items]
                    for name, items in lists.items()
                }
    return [found[index] for index in sorted(found)]


def whole(client: openai.OpenAI, **options: Any) -> list[dict[str, Any]]:
    """The choices of a reply that is sent at once, in the same form."""
    choices = client.completions.create(model="fake", **options).choices
    logprobs = [choice.logprobs and choice.logprobs.model_dump() for choice in choices]
    return [
        {"text": c.text, "logprobs": found, "finish_reason": c.finish_reason}
        for c, found in zip(choices, logprobs, strict=True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "abc"},
        {"prompt": [97, 98, 99]},
        {"prompt": ["abc", "é€"], "n": 2, "logprobs": 2},
        {"prompt": [[97, 98], [99, 100, 101]], "logprobs": 0},
        {"prompt": "abc", "max_tokens": 0, "logprobs": 1},
        {"prompt": "abc", "max_tokens": 0},
        {"prompt": "a|bcd", "stop": "|", "logprobs": 3},
        {"prompt": "abcdef", "logprobs": 2, "extra_body": {"truncate_prompt_tokens": 3}},
        {"prompt": "abc", "logprobs": 1, "extra_body": {"return_tokens_as_token_ids": True}},
    ],
    ids=range(9),
)
def test_an_echo_is_the_same_streamed_and_whole(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    assert joined(client, echo=True, **options) == whole(client, echo=True, **options)


@pytest.mark.parametrize("top", [None, 0, 3])
@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"stop": "im"}, {"max_tokens": 3}], ids=str)
def test_log_probabilities_of_a_chat_are_the_same_streamed_and_whole(
    client: openai.OpenAI, extra: dict[str, Any], top: int | None
) -> None:
    options: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "é€"}],
        "logprobs": True,
        **extra,
    }
    options |= {} if top is None else {"top_logprobs": top}
    choices = client.chat.completions.create(**options).choices
    found: dict[int, list[Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).extend(
                (choice.logprobs and choice.logprobs.content) or []
            )
    for choice in choices:
        assert choice.logprobs is not None
        assert found[choice.index] == choice.logprobs.content
        assert all(len(at.top_logprobs) == (top or 0) for at in choice.logprobs.content or [])
    assert len(found) == extra.get("n", 1)


def test_an_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    for prompt in ("abc", [97, 98, 99]):
        # The fake engine says the prompt once more
        assert whole(client, prompt=prompt, echo=True)[0]["text"] == "abcabc"
    texts = [choice["text"] for choice in whole(client, prompt=["ab", "xyz"], n=2, echo=True)]
    assert texts == ["abab", "abab", "xyzxyz", "xyzxyz"]
    kept = whole(client, prompt="abcdef", echo=True, extra_body={"truncate_prompt_tokens": 3})
    assert kept[0]["text"] == "defdef"


def test_an_echo_with_log_probabilities_names_every_token(client: openai.OpenAI) -> None:
    found = whole(client, prompt="abc", echo=True, logprobs=1)[0]["logprobs"]
    assert found["tokens"] == list("abcabc")
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.25, -0.25, -0.25]
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert found["top_logprobs"] == [
        None,
        {"c": -0.25, "b": -0.5},
        {"d": -0.25, "c": -0.5},
        {"a": -0.25},
        {"b": -0.25},
        {"c": -0.25},
    ]


def test_a_prompt_can_be_scored_without_generating(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt=[[97, 98, 99], [100]], echo=True, logprobs=1, max_tokens=0
    )
    assert [choice.text for choice in reply.choices] == ["abc", "d"]
    assert [choice.finish_reason for choice in reply.choices] == ["length", "length"]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 0)


def test_the_expression_of_evaluation_harnesses_finds_its_numbers(client: openai.OpenAI) -> None:
    """They send ids with one token to generate, and slice lists and compare floats."""
    context, prompts = 2, [[97, 98, 99, 100]]
    reply = client.completions.create(
        model="fake", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    tokens, tops = found.token_logprobs[context:-1], found.top_logprobs[context:-1]
    assert tokens == [-0.5, -0.5]
    assert [token == max(top.values()) for token, top in zip(tokens, tops, strict=True)] == [
        False,
        False,
    ]


EXPECTED = {
    "b": {
        "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
    },
    "c": {
        "99": {"logprob": -0.5, "rank": 2, "decoded_token": "c"},
        "100": {"logprob": -0.25, "rank": 1, "decoded_token": "d"},
    },
}


def test_prompt_logprobs_of_completions_belong_to_each_choice(server: Running) -> None:
    answer = server.post(
        COMPLETIONS, {"model": "fake", "prompt": ["abc", "b"], "n": 2, "prompt_logprobs": 1}
    ).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [
        [None, EXPECTED["b"], EXPECTED["c"]]
    ] * 2 + [[None]] * 2
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert (
        "prompt_logprobs"
        not in server.post(COMPLETIONS, {"model": "fake", "prompt": "a"}).json()["choices"][0]
    )


def test_prompt_logprobs_of_a_chat_belong_to_the_reply(server: Running) -> None:
    answer = server.post(CHAT, {"model": "fake", "messages": USER, "prompt_logprobs": 3}).json()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    assert {entry["rank"] for entry in others[0].values()} == {1, 2, 3}
    assert min(entry["logprob"] for entry in others[0].values()) == -9999.0


def test_an_echo_may_have_more_top_tokens_than_prompt_logprobs_and_the_other_way_round(
    server: Running,
) -> None:
    for top, wanted in ((3, 1), (1, 3)):
        body = {
            "model": "fake",
            "prompt": "abc",
            "echo": True,
            "logprobs": top,
            "prompt_logprobs": wanted,
        }
        choice = server.post(COMPLETIONS, body).json()["choices"][0]
        # The token itself is always there
        assert len(choice["logprobs"]["top_logprobs"][1]) == max(top, 2)
        assert len(choice["prompt_logprobs"][1]) == max(wanted, 2)


def test_tokens_can_be_named_by_their_ids(client: openai.OpenAI) -> None:
    named = {"return_tokens_as_token_ids": True}
    completion = client.completions.create(
        model="fake", prompt="ab", logprobs=1, extra_body=named
    ).choices[0]
    assert completion.text == "ab"
    assert completion.logprobs is not None
    assert completion.logprobs.tokens == ["token_id:97", "token_id:98"]
    assert completion.logprobs.top_logprobs == [{"token_id:97": -0.25}, {"token_id:98": -0.25}]
    chat = client.chat.completions.create(
        model="fake", messages=USER, logprobs=True, max_tokens=1, extra_body=named
    )  # type: ignore[arg-type]
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].token.startswith("token_id:")


def test_a_chat_echoes_the_assistants_own_last_message(client: openai.OpenAI) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": "So"}]
    going_on = {"echo": True, "continue_final_message": True}
    reply = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=2, extra_body=going_on
    )
    plain = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=2, extra_body={"continue_final_message": True}
    )
    assert reply.choices[0].message.content == f"So{plain.choices[0].message.content}"
    stream = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=2, stream=True, extra_body=going_on
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        == reply.choices[0].message.content
    )
    others = client.chat.completions.create(
        model="fake", messages=USER, max_tokens=1, extra_body={"echo": True}
    )  # type: ignore[arg-type]
    assert others.choices[0].message.content is not None
    assert not others.choices[0].message.content.startswith("a")


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": False, "echo": True}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0, "min_tokens": 2, "echo": True}, "min_tokens"),
        (COMPLETIONS, {"echo": "yes"}, "echo"),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[97] * 100] * 1024, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETIONS, {"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        (CHAT, {"max_tokens": 0, "echo": True}, "max_tokens"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(
    server: Running, path: str, extra: dict[str, Any], param: str
) -> None:
    answer = server.post(
        path,
        {
            "model": "fake",
            "prompt" if path == COMPLETIONS else "messages": "a" if path == COMPLETIONS else USER,
        }
        | extra,
    )
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "So wh"},
        {"role": "system", "content": "Be"},
        {"role": "assistant", "content": "I"},
    ],
)
def test_a_message_that_is_continued_stays_that_of_its_role(
    client: openai.OpenAI, last: dict[str, str]
) -> None:
    messages: Any = [*USER, last]
    asks: Any = {
        "model": "fake",
        "messages": messages,
        "max_tokens": 2,
        "extra_body": {"continue_final_message": True, "echo": True},
    }
    reply = client.chat.completions.create(**asks).choices[0].message
    assert reply.role == last["role"] and (reply.content or "").startswith(last["content"])
    chunks = list(client.chat.completions.create(**asks, stream=True))
    assert chunks[0].choices[0].delta.role == last["role"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.content
    asks["extra_body"] = {"echo": True}
    assert client.chat.completions.create(**asks).choices[0].message.role == "assistant"


def test_tool_calls_are_not_cut_off_a_message_to_continue_it(server: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [*USER, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    answer = server.post(
        "/v1/chat/completions",
        {"model": "fake", "messages": messages, "continue_final_message": True},
    )
    assert answer.status == 400 and "continue_final_message" in answer.error["message"]
