"""Whatever valid options a request combines, with the real engine behind the server: a stream says what the whole reply says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.server.core import Factory
from tests.engine.conftest import write_random
from tests.server.harness import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 800


class Real(Running):
    """A server with an engine that computes."""

    def __init__(self, engine: Engine):
        super().__init__(engine.tokenizer)
        self.engine = engine

    def factory(self) -> Factory:
        """The engine that is there."""
        return lambda config, on_phase: (self.engine, {})


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Iterator[Real]:
    """Random weights say anything, broken characters included."""
    config = EngineConfig(
        model=write_random(tmp_path_factory.mktemp("random"), repo),
        load_format="dummy",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=16,
        num_gpu_blocks_override=64,
        enforce_eager=True,
    )
    with Real(Engine.from_config(config)) as running:
        yield running
    running.engine.scheduler.check()
    assert running.engine.stats().free_pages == running.engine.stats().num_pages


ids = st.integers(0, VOCAB - 1)
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
    "guided_regex": st.sampled_from(["[a-z]{3,30}", "(yes|no), the quick brown fox (jumps|sleeps)"]),
    "cache_salt": st.sampled_from(["x", "y"]),
    "return_tokens_as_token_ids": st.booleans(),
}
seeds = [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0.3, "seed": -(2**63)}, {"temperature": 2, "seed": 0}]


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """A few of what both endpoints take."""
    names = draw(st.lists(st.sampled_from(sorted(sometimes)), unique=True, max_size=7))
    found = draw(st.sampled_from(seeds)) | {"max_tokens": 8} | {name: draw(sometimes[name]) for name in names}
    if "guided_regex" in found:  # which may need what these forbid
        found = {name: value for name, value in found.items() if name not in ("allowed_token_ids", "bad_words")}
    return found if "stop" in found else found | draw(st.sampled_from([{}, {}, {}, {"detokenize": False}]))


prompts = st.sampled_from(["The", [[5, 6, 7]], ["one two", "three"], [[9] * 40, [1, 2]], "12 + 34 = 46. " * 5])
completions = st.builds(
    lambda shared, prompt, logprobs, echo: {"model": "fake", "prompt": prompt} | shared | logprobs | echo,
    options(),
    prompts,
    st.sampled_from([{}, {"logprobs": 0}, {"logprobs": 3}]),
    st.sampled_from([{}, {}, {"echo": True}, {"echo": True, "max_tokens": 0, "min_tokens": 0}]),
)
chats = st.builds(
    lambda shared, text, logprobs: {"model": "fake", "messages": [{"role": "user", "content": text}]} | shared | logprobs,
    options(),
    st.sampled_from(["hi", "What is 2 + 3?"]),
    st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]),
)


def joined(events: list[dict[str, Any]], chat: bool) -> dict[int, dict[str, Any]]:
    """By choice what its chunks say together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for chunk in event["choices"]:
            choice = found.setdefault(chunk["index"], {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None})
            assert choice["finish_reason"] is None, "nothing follows the end"
            choice["text"] += (chunk["delta"].get("content") or "") if chat else chunk["text"]
            choice["finish_reason"], choice["stop_reason"] = chunk["finish_reason"], chunk.get("stop_reason")
            if chunk["logprobs"] is not None:
                columns = choice["logprobs"] = choice["logprobs"] or {}
                for name, cells in chunk["logprobs"].items():
                    columns[name] = columns.get(name, []) + cells if cells is not None else None
    return found


def whole_of(choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The same of a reply that came at once."""
    text = choice["message"]["content"] if chat else choice["text"]
    return {"text": text} | {name: choice[name] for name in ("logprobs", "finish_reason", "stop_reason")}


def entries(logprobs: dict[str, Any] | None, chat: bool) -> list[Any]:
    """Position by position: the token, its log-probability, the likeliest ones, and what else is told. Raises where shapes do not agree."""
    if logprobs is None:
        return []
    if chat:
        return [
            (at["token"], at["logprob"], {top["token"]: top["logprob"] for top in at["top_logprobs"]}) for at in logprobs["content"] or ()
        ]
    columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return list(zip(*columns, strict=True))


def alike(one: Any, other: Any) -> bool:
    """Equal, and numbers but for rounding: which shapes a step has depends on what else it computes, and on what is cached."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return all(alike(one[key], other[key]) for key in one.keys() & other.keys()) and len(one.keys() ^ other.keys()) <= 2
    return bool(one == other)


def assert_a_stream_is_the_whole(real: Real, path: str, body: dict[str, Any]) -> None:
    chat = path == CHAT
    answers = [real.post(path, body | extra) for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}})]
    assert [answer.status for answer in answers] == [200, 200], [answer.body[:300] for answer in answers]
    whole, events = answers[0].json(), answers[1].events()
    streamed = joined(events, chat)
    prompts = 1 if chat or isinstance(body["prompt"], str) else len(body["prompt"])
    assert [choice["index"] for choice in whole["choices"]] == sorted(streamed) == list(range(prompts * body.get("n", 1)))
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
            assert one[2] is None or len(one[2]) <= max(1, body.get("top_logprobs", 0), body.get("logprobs") or 0) + 1
        told += len(found)
    usage = [whole["usage"], events[-1]["usage"]]
    assert usage[0]["completion_tokens"] == usage[1]["completion_tokens"] and usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
    if "logprobs" in body:
        before = usage[0]["prompt_tokens"] * body.get("n", 1) if body.get("echo") else 0
        assert told == usage[0]["completion_tokens"] + before


slowly = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))


@slowly
@given(body=completions)
def test_a_streamed_completion_is_the_whole_one(real: Real, body: dict[str, Any]) -> None:
    assert_a_stream_is_the_whole(real, COMPLETIONS, body)


@slowly
@given(body=chats)
def test_a_streamed_chat_is_the_whole_one(real: Real, body: dict[str, Any]) -> None:
    assert_a_stream_is_the_whole(real, CHAT, body)
