"""Whatever valid options a request combines, with the real engine behind the server: a stream says
what the whole reply says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.real import Real, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 800


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Iterator[Real]:
    """Random weights say anything, broken characters included."""
    yield from served(tmp_path_factory.mktemp("random"), repo)


ids = st.integers(0, VOCAB - 1)
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
STRUCTURES: list[dict[str, Any]] = [
    {"guided_regex": "[a-z]{3,30}"},
    {"guided_regex": "(yes|no), the quick brown fox (jumps|sleeps)"},
    {"guided_choice": ["one", "one two three four five", "2"]},
    {"guided_grammar": 'start: word ("," word)*\nword: /[a-z]{1,3}/'},
    {"structured_outputs": {"json": SUM, "disable_any_whitespace": True}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}},
    {"response_format": {"type": "json_object"}},
    {
        "structural_tag": {
            "structures": [{"begin": "<f>", "schema": SUM, "end": "</f>"}],
            "triggers": ["<"],
        },
        "logit_bias": {"27": 5},
    },
]
sometimes: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 14),
    "n": st.integers(1, 3),
    "top_p": st.sampled_from([0.5, 0.9]),
    "top_k": st.sampled_from([-1, 0, 1, 7, 10**9]),
    "min_p": st.sampled_from([0.01, 0.2]),
    "presence_penalty": st.sampled_from([-2, 0.7]),
    "frequency_penalty": st.sampled_from([-0.3, 2]),
    "repetition_penalty": st.sampled_from([0.8, 1.4]),
    "logit_bias": st.dictionaries(ids.map(str), st.sampled_from([-100, -2, 3.5]), max_size=5),
    "allowed_token_ids": st.lists(ids, min_size=3, max_size=300),
    "bad_words": st.lists(st.sampled_from(["a", " the", "b c", "1", "zz"]), max_size=3),
    "stop": st.sampled_from(["e", ["a", "in"], [" "], "no such text"]),
    "stop_token_ids": st.lists(ids, max_size=30),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 4]),
    "min_tokens": st.integers(1, 9),
    "structure": st.sampled_from(STRUCTURES),
    "cache_salt": st.sampled_from(["x", "y"]),
    "return_tokens_as_token_ids": st.booleans(),
}
seeds = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.3, "seed": -(2**63)},
    {"temperature": 2, "seed": 0},
]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """A few of what both endpoints take."""
    names = draw(st.lists(st.sampled_from(sorted(sometimes)), unique=True, max_size=7))
    found = (
        draw(st.sampled_from(seeds))
        | {"max_tokens": 8}
        | {name: draw(sometimes[name]) for name in names}
    )
    structure = found.pop("structure", None)
    forbidding: set[str] = set()
    if structure is not None or "min_tokens" in found:  # which may need what these forbid
        found["max_tokens"] = max(found["max_tokens"], found.get("min_tokens", 0))
        forbidding = {
            "allowed_token_ids",
            "bad_words",
            *(("stop_token_ids",) if "min_tokens" in found else ()),
        }
    found = {name: value for name, value in found.items() if name not in forbidding} | (
        structure or {}
    )
    return (
        found
        if "stop" in found
        else found | draw(st.sampled_from([{}, {}, {}, {"detokenize": False}]))
    )


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    """Beam searches, and more choices than are told, which cannot be streamed unless they are
    beams."""
    n = draw(st.integers(1, 2))
    found: dict[str, Any] = {
        "use_beam_search": True,
        "n": n,
        "best_of": 2,
        "max_tokens": draw(st.integers(1, 9)),
        "temperature": 0,
    }
    names = draw(
        st.lists(
            st.sampled_from(
                ["include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"]
            ),
            unique=True,
        )
    )
    found |= {name: draw(sometimes[name]) for name in names} | draw(
        st.sampled_from([{}, {"min_tokens": 1}, {"ignore_eos": True}])
    )
    found |= {
        "length_penalty": draw(st.sampled_from([0, 1, 2.5])),
        "early_stopping": draw(st.sampled_from([True, False, "never"])),
    }
    return found | {"stop_token_ids": draw(st.lists(ids, max_size=4))}


prompts = st.sampled_from(
    ["The", [[5, 6, 7]], ["one two", "three"], [[9] * 40, [1, 2]], "12 + 34 = 46. " * 5]
)
completions = st.builds(
    lambda shared, prompt, logprobs, echo: (
        {"model": "fake", "prompt": prompt} | shared | logprobs | echo
    ),
    options(),
    prompts,
    st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 3}]),
    st.sampled_from([{}, {}, {"echo": True}, {"echo": True, "max_tokens": 0, "min_tokens": 0}]),
)
chats = st.builds(
    lambda shared, text, logprobs: (
        {"model": "fake", "messages": [{"role": "user", "content": text}]} | shared | logprobs
    ),
    options(),
    st.sampled_from(["hi", "What is 2 + 3?"]),
    st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]),
)


def joined(events: list[dict[str, Any]], chat: bool) -> dict[int, dict[str, Any]]:
    """By choice what its chunks say together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            choice = found.setdefault(
                chunk["index"],
                {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None},
            )
            assert choice["finish_reason"] is None, "nothing follows the end"
            choice["text"] += (chunk["delta"].get("content") or "") if chat else chunk["text"]
            choice["finish_reason"], choice["stop_reason"] = (
                chunk["finish_reason"],
                chunk.get("stop_reason"),
            )
            if chunk["logprobs"] is not None:
                columns = choice["logprobs"] = choice["logprobs"] or {}
                for name, cells in chunk["logprobs"].items():
                    columns[name] = columns.get(name, []) + cells if cells is not None else None
    return found


def whole_of(choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The same of a reply that came at once."""
    text = choice["message"]["content"] if chat else choice["text"]
    return {"text": text} | {
        name: choice[name] for name in ("logprobs", "finish_reason", "stop_reason")
    }


def entries(logprobs: dict[str, Any] | None, chat: bool) -> list[Any]:
    """Position by position: the token, its log-probability, the likeliest ones, and what else is
    told. Raises where shapes do not agree."""
    if logprobs is None:
        return []
    if chat:
        return [
            (
                at["token"],
                at["logprob"],
                {top["token"]: top["logprob"] for top in at["top_logprobs"]},
            )
            for at in logprobs["content"] or ()
        ]
    columns = [
        logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ]
    return list(zip(*columns, strict=True))


def alike(one: Any, other: Any) -> bool:
    """Equal, and numbers but for rounding: which shapes a step has depends on what else it
    computes, and on what is cached."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return (
            all(alike(one[key], other[key]) for key in one.keys() & other.keys())
            and len(one.keys() ^ other.keys()) <= 2
        )
    return bool(one == other)


def assert_a_stream_is_the_whole(real: Real, path: str, body: dict[str, Any]) -> None:
    chat = path == CHAT
    answers = [
        real.post(path, body | extra)
        for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}})
    ]
    assert [answer.status for answer in answers] == [200, 200], [
        answer.body[:300] for answer in answers
    ]
    whole, events = answers[0].json(), answers[1].events()
    streamed = joined(events, chat)
    prompts = 1 if chat or isinstance(body["prompt"], str) else len(body["prompt"])
    assert (
        [choice["index"] for choice in whole["choices"]]
        == sorted(streamed)
        == list(range(prompts * body.get("n", 1)))
    )
    told = 0
    for choice in whole["choices"]:
        mine, theirs = whole_of(choice, chat), streamed[choice["index"]]
        assert mine["finish_reason"] in ("stop", "length")
        for name in ("text", "finish_reason", "stop_reason"):
            assert mine[name] == theirs[name], name
        found, expected = entries(theirs["logprobs"], chat), entries(mine["logprobs"], chat)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert all(map(alike, one, other)), (one, other)
            assert (
                one[2] is None
                or len(one[2]) <= max(1, body.get("top_logprobs", 0), body.get("logprobs") or 0) + 1
            )
        told += len(found)
    usage = [whole["usage"], events[-1]["usage"]]
    assert (
        usage[0]["completion_tokens"] == usage[1]["completion_tokens"]
        and usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
    )
    if "logprobs" in body:
        before = usage[0]["prompt_tokens"] * body.get("n", 1) if body.get("echo") else 0
        assert told == usage[0]["completion_tokens"] + before


slowly = settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@slowly
@given(body=completions)
def test_a_streamed_completion_is_the_whole_one(real: Real, body: dict[str, Any]) -> None:
    assert_a_stream_is_the_whole(real, COMPLETIONS, body)


@pytest.mark.slow
@settings(slowly, max_examples=12)
@given(
    search=searches(), prompt=prompts, chat=st.booleans(), logprobs=st.sampled_from([None, 0, 2])
)
def test_a_streamed_search_is_the_whole_one(
    real: Real, search: dict[str, Any], prompt: Any, chat: bool, logprobs: int | None
) -> None:
    shown = (
        {}
        if logprobs is None
        else {"logprobs": True, "top_logprobs": logprobs}
        if chat
        else {"logprobs": logprobs}
    )
    said = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": prompt}
    assert_a_stream_is_the_whole(
        real, CHAT if chat else COMPLETIONS, {"model": "fake"} | search | said | shown
    )


@settings(slowly, max_examples=12)
@given(body=completions, more=st.integers(1, 2))
def test_the_best_of_several_are_the_likeliest_of_as_many_choices(
    real: Real, body: dict[str, Any], more: int
) -> None:
    body = {
        name: value
        for name, value in body.items()
        if name not in ("echo", "stop", "include_stop_str_in_output")
    }
    body |= {
        "logprobs": 0,
        "temperature": 1,
        "seed": 3,
        "max_tokens": max(1, body["max_tokens"]),
        "n": body.get("n", 1),
    }
    best_of = body["n"] + more
    assert (
        real.post(COMPLETIONS, body | {"best_of": best_of, "stream": True}).error["param"]
        == "best_of"
    )
    found = real.post(COMPLETIONS, body | {"best_of": best_of}).json()["choices"]
    every = real.post(COMPLETIONS, body | {"n": best_of}).json()["choices"]
    for prompt in range(len(found) // body["n"]):
        mine, theirs = found[prompt * body["n"] :][: body["n"]], every[prompt * best_of :][:best_of]
        sums = sorted((likelihood(choice) for choice in theirs), reverse=True)
        assert [likelihood(choice) for choice in mine] == pytest.approx(sums[: body["n"]], abs=1e-3)
        assert {choice["text"] for choice in mine} <= {choice["text"] for choice in theirs}


def likelihood(choice: dict[str, Any]) -> float:
    """Its sum of log-probabilities."""
    return sum(choice["logprobs"]["token_logprobs"])


@slowly
@given(body=chats)
def test_a_streamed_chat_is_the_whole_one(real: Real, body: dict[str, Any]) -> None:
    assert_a_stream_is_the_whole(real, CHAT, body)
