"""The built-in model behind the real server, through openai-python, with programs compiled on first
use: answers, streams, structured output, tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.demo.conversations import CALCULATOR, WEATHER
from tests.server.demo_server import Demo, assert_idle
from tests.server.test_demo import DIGITS, SUM

TOOLS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (CALCULATOR, WEATHER)}


@pytest.fixture(scope="module")
def eager() -> Iterator[Demo]:
    """A server that compiles what it needs, for the tests that run every time."""
    demo = Demo("--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "2048")
    try:
        yield demo
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


def test_a_server_answers_streams_and_forgets_a_client_that_leaves(eager: Demo) -> None:
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": "demo",
            "messages": DIGITS,
            "temperature": 0,
            "max_tokens": 64,
        }
        whole = client.chat.completions.create(**options).choices[0]
        assert "72" in (whole.message.content or "")
        assert whole.finish_reason == "stop"
        streamed = [
            c.choices[0]
            for c in client.chat.completions.create(**options, stream=True)
            if c.choices
        ]
        assert "".join(choice.delta.content or "" for choice in streamed) == whole.message.content
        assert streamed[-1].finish_reason == "stop"

        options |= {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": SUM, "strict": True},
            }
        }
        whole = client.chat.completions.create(**options).choices[0]
        jsonschema.validate(json.loads(whole.message.content or ""), SUM)
        assert whole.finish_reason == "stop"
        streamed = [
            c.choices[0]
            for c in client.chat.completions.create(**options, stream=True)
            if c.choices
        ]
        assert "".join(choice.delta.content or "" for choice in streamed) == whole.message.content

        assert (
            eager.metric("vllm:prefix_cache_queries_total")
            > eager.metric("vllm:prefix_cache_hits_total")
            > 0
        )
        leaving = client.completions.create(
            model="demo",
            prompt="abc",
            temperature=0,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(leaving))
        assert eager.metric("vllm:num_requests_running") == 1
        before = eager.metric("vllm:generation_tokens_total")
        leaving.close()
        assert_idle(eager, client)
        assert eager.metric("vllm:generation_tokens_total") - before < 1500, (
            "it ran to its end instead"
        )


def test_token_ids_are_those_of_the_text(eager: Demo) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": DIGITS, "temperature": 0}
    options |= {"extra_body": {"return_token_ids": True}}
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**options).model_dump()
        chunks = [c.model_dump() for c in client.chat.completions.create(**options, stream=True)]
        (choice,) = whole["choices"]
        ids = choice["token_ids"]
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
        assert len(ids) == whole["usage"]["completion_tokens"]
        body = {"model": "demo", "tokens": ids[:-1]}  # without the end token
        root = client.with_options(base_url=eager.url)
        text = root.post("/detokenize", cast_to=object, body=body)
        assert text == {"prompt": choice["message"]["content"]}
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == ids
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_stream_comes_in_the_intervals_that_it_asks_for(eager: Demo, thinks: bool) -> None:
    question = {"role": "user", "content": "Sort these numbers: 42, 7, 99, 13"}
    options: dict[str, Any] = {"model": "demo", "messages": [question], "temperature": 0}
    extra = {"return_token_ids": True, "reasoning_effort": "high" if thinks else "none"}
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:

        def stream(interval: int) -> list[dict[str, Any]]:
            body = {"extra_body": extra | {"stream_interval": interval}}
            usage = {"stream_options": {"include_usage": True}}
            chunks = client.chat.completions.create(**options, **body, **usage, stream=True)
            return [chunk.model_dump() for chunk in chunks]

        found = {interval: stream(interval) for interval in (1, 4, 1000)}
    said, sizes = {}, {}
    for interval, chunks in found.items():
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        ids = [id for choice in choices for id in choice["token_ids"]]
        texts = [
            "".join(choice["delta"].get(name) or "" for choice in choices)
            for name in ("content", "reasoning")
        ]
        said[interval] = (ids, texts, chunks[-1]["usage"])
        sizes[interval] = [len(c["token_ids"]) for c in choices if c["token_ids"]]
    for _, _, usage in said.values():
        usage.pop("prompt_tokens_details")  # the first computes the prompt
    assert said[1] == said[4] == said[1000]
    count = len(said[1][0])
    assert count > 9
    assert bool(said[1][1][1]) is thinks
    assert sizes[1] == [1] * count
    assert sizes[4] == [1, *(min(4, count - at) for at in range(1, count, 4))]
    assert sizes[1000] == [1, count - 1]


def test_a_responses_text_has_its_own_log_probabilities_in_any_interval(eager: Demo) -> None:
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        one, all_at_once = (
            client.responses.create(
                model="demo",
                input="Sort these numbers: 42, 7, 99, 13",
                temperature=0,
                max_output_tokens=300,
                reasoning={"effort": "high"},
                include=["message.output_text.logprobs"],
                extra_body={"stream_interval": interval},
            )
            for interval in (1, 1000)
        )
    for response in (one, all_at_once):
        assert [item.type for item in response.output] == ["reasoning", "message"]
    texts = [response.output[1].content[0] for response in (one, all_at_once)]  # type: ignore[union-attr, index]
    assert texts[0] == texts[1]
    assert one.usage is not None and all_at_once.usage is not None
    assert one.usage.output_tokens_details == all_at_once.usage.output_tokens_details


@pytest.mark.parametrize("thinks", [False, True])
def test_an_agent_uses_a_calculator_whole_and_streamed(eager: Demo, thinks: bool) -> None:
    question = {"role": "user", "content": "What is 47 * 83?"}
    options: dict[str, Any] = {
        "model": "demo",
        "messages": [question],
        "tools": [CALCULATOR],
        "temperature": 0,
        "reasoning_effort": "high" if thinks else "none",
    }
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content in (None, "")
            (call,) = choice.message.tool_calls or ()
            assert call.function.name == "calculator"
            assert json.loads(call.function.arguments) == {"expression": "47 * 83"}
            assert bool(getattr(choice.message, "reasoning", None)) is thinks
        answer = whole.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3901"}
        options |= {"messages": [question, answer, result]}
        assert "3901" in (
            client.chat.completions.create(**options).choices[0].message.content or ""
        )


def test_a_call_that_is_demanded_is_made(eager: Demo) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [CALCULATOR, WEATHER],
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice, names in (("required", TOOLS), (named, {"get_weather"}), ("auto", set())):
            message = (
                client.chat.completions.create(**options, tool_choice=choice).choices[0].message
            )
            calls = message.tool_calls or []
            assert bool(calls) is bool(names)
            for call in calls:
                assert call.function.name in names
                jsonschema.validate(json.loads(call.function.arguments), TOOLS[call.function.name])


@pytest.mark.parametrize(
    "tools", [{}, {"tools": [WEATHER], "tool_choice": "required"}], ids=["alone", "demanded"]
)
def test_thought_ends_at_its_budget(eager: Demo, tools: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{eager.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is 47 * 83?"}],
            temperature=0,
            max_tokens=100,
            extra_body={"thinking_token_budget": 8, "reasoning_effort": "high"},
            **tools,
        )
    choice = reply.choices[0]
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens == 9  # with the end marker
    assert choice.message.reasoning  # type: ignore[attr-defined]
    assert choice.finish_reason == ("tool_calls" if tools else "stop")
    assert choice.message.tool_calls if tools else choice.message.content
