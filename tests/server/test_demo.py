"""The real engine and the built-in model behind the real server, through openai-python.

They share a server that has compiled its whole lattice; `test_demo_eager.py` runs every time.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import jsonschema
import openai
import pydantic
import pytest

from tests.server.demo_server import Demo, assert_idle

slow = pytest.mark.slow

SUM = {
    "type": "object",
    "properties": {
        "question": {"type": "string", "maxLength": 20},
        "sum": {"type": "integer", "minimum": 0, "maximum": 200},
    },
    "required": ["question", "sum"],
    "additionalProperties": False,
}
DIGITS = [{"role": "user", "content": "What is 27 + 45?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """One for all tests; it must end cleanly and must not have compiled anything while serving."""
    demo = Demo()
    try:
        yield demo
        compiles = demo.metric("jaxllm:compiles_after_warmup_total")
        assert demo.stop() == 0
        assert compiles == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


@pytest.fixture(scope="module")
def client(demo: Demo) -> Iterator[openai.OpenAI]:
    """openai-python."""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@slow
def test_the_start_up_table_says_what_was_decided(demo: Demo) -> None:
    for row in ("device", "dtype", "weights", "KV cache", "maximum concurrency", "step programs"):
        assert row in demo.log


@slow
def test_the_built_in_model_answers_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="demo", messages=DIGITS, temperature=0, max_tokens=200
    )  # type: ignore[arg-type]
    assert "72" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


@slow
def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=DIGITS, temperature=0, max_tokens=64
    )  # type: ignore[arg-type]
    chunks = client.chat.completions.create(
        model="demo",
        messages=DIGITS,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@slow
def test_prompts_together_are_answered_as_alone(client: openai.OpenAI) -> None:
    prompts = ["1 + 2 =", "sort 3 1 2:", "a b c"]
    options = {"model": "demo", "temperature": 0, "max_tokens": 12, "logprobs": 2}
    together = client.completions.create(prompt=prompts, **options)  # type: ignore[call-overload]
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(prompt=prompt, **options)  # type: ignore[call-overload]
        assert together.choices[number].text == alone.choices[0].text
        found, expected = (
            together.choices[number].logprobs.token_logprobs,
            alone.choices[0].logprobs.token_logprobs,
        )
        assert found == pytest.approx(expected, abs=1e-4)


@slow
def test_a_text_is_scored_as_it_was_generated_cached_or_not(client: openai.OpenAI) -> None:
    named = {"ignore_eos": True, "skip_special_tokens": False, "return_tokens_as_token_ids": True}
    options: dict[str, Any] = {
        "model": "demo",
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "extra_body": named,
    }
    said = client.completions.create(prompt="12 + 34 =", max_tokens=10, **options).choices[0]
    assert said.text.startswith("12 + 34 =")
    assert (
        said.logprobs is not None
        and said.logprobs.tokens is not None
        and said.logprobs.token_logprobs is not None
    )
    ids = [int(token.removeprefix("token_id:")) for token in said.logprobs.tokens]
    for _ in range(2):  # the second time its pages are cached
        scored = client.completions.create(prompt=ids, max_tokens=0, **options).choices[0]
        assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
        assert scored.text == said.text
        assert scored.logprobs.tokens == said.logprobs.tokens
        assert scored.logprobs.token_logprobs[0] is None
        assert scored.logprobs.token_logprobs[1:] == pytest.approx(
            said.logprobs.token_logprobs[1:], abs=1e-3
        )


@slow
def test_the_same_seed_gives_the_same_choices_whoever_is_beside(client: openai.OpenAI) -> None:
    def ask(n: int) -> list[str]:
        reply = client.completions.create(
            model="demo", prompt="once", seed=7, temperature=1.5, max_tokens=16, n=n
        )
        return [choice.text for choice in reply.choices]

    three = ask(3)
    assert ask(3) == three
    assert ask(1) == three[:1]
    assert len(set(three)) > 1


@slow
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(
        model="demo", prompt="abc", temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    ).choices[0]
    stop = free.text[3:5]
    cut = client.completions.create(
        model="demo", prompt="abc", temperature=0, max_tokens=24, stop=[stop]
    ).choices[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"


ASKED: list[dict[str, Any]] = [
    {"presence_penalty": 1.2, "frequency_penalty": 0.6, "extra_body": {"repetition_penalty": 1.3}},
    {"logit_bias": {"40": 3, "41": 3.5}, "temperature": 0.9, "seed": 3},
    {"extra_body": {"allowed_token_ids": list(range(30, 90)), "min_tokens": 4}},
    {
        "extra_body": {"bad_words": ["72", "Answer", "the sum"], "top_k": 30},
        "seed": 5,
        "temperature": 0.7,
        "presence_penalty": 0.5,
    },
]


@slow
@pytest.mark.parametrize("options", ASKED, ids=range(4))
def test_penalties_biases_and_masks_give_the_same_streamed_or_whole_on_both_endpoints(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    options = {"temperature": 0, **options, "model": "demo", "max_tokens": 24}
    completion = {**options, "prompt": "What is 27 + 45?"}
    plain = (
        client.completions.create(
            model="demo", prompt="What is 27 + 45?", temperature=0, max_tokens=24
        )
        .choices[0]
        .text
    )
    whole = client.completions.create(**completion).choices[0].text
    assert (
        "".join(c.choices[0].text for c in client.completions.create(**completion, stream=True))
        == whole
        != plain
    )
    chat = {**options, "messages": DIGITS}
    said = client.chat.completions.create(**chat).choices[0].message.content
    assert (
        "".join(
            c.choices[0].delta.content or ""
            for c in client.chat.completions.create(**chat, stream=True)
        )
        == said
    )
    if "bad_words" in options.get("extra_body", {}):
        assert not any(
            word in f"{whole} {said}".split() for word in options["extra_body"]["bad_words"]
        )
    assert (
        client.completions.create(
            model="demo", prompt="What is 27 + 45?", temperature=0, max_tokens=24
        )
        .choices[0]
        .text
        == plain
    )


@slow
def test_a_bad_word_without_tokens_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt="a", extra_body={"bad_words": [""]})
    assert refused.value.param == "bad_words"


@slow
def test_a_client_that_leaves_gives_its_pages_back(demo: Demo, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="abc", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert_idle(demo, client)


@slow
def test_structured_outputs_of_every_kind_follow_it_on_both_endpoints(
    client: openai.OpenAI,
) -> None:
    def complete(**body: Any) -> str:
        reply = client.completions.create(
            model="demo", prompt="abc", seed=1, max_tokens=200, extra_body=body
        )
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].text

    assert re.fullmatch(r"[a-z]{2}\d{3}", complete(guided_regex=r"[a-z]{2}\d{3}"))
    assert complete(structured_outputs={"choice": ["red", "green"]}) in ("red", "green")
    jsonschema.validate(json.loads(complete(guided_json=SUM)), SUM)
    assert complete(guided_grammar='root ::= "<" [a-c]{3} ">"')[0] == "<"

    class Sum(pydantic.BaseModel):
        question: Annotated[str, pydantic.Field(max_length=20)]
        sum: Annotated[int, pydantic.Field(ge=0, le=200)]

    parsed = client.chat.completions.parse(
        model="demo", messages=DIGITS, response_format=Sum, max_tokens=200
    )  # type: ignore[arg-type]
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    chat = client.chat.completions.create(
        model="demo", messages=DIGITS, response_format={"type": "json_object"}, max_tokens=300
    )  # type: ignore[arg-type]
    assert (chat.choices[0].message.content or "").startswith("{")


@slow
def test_a_grammar_that_explodes_while_generating_ends_its_request_while_another_streams_on(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "prompt": "abc",
        "temperature": 0,
        "max_tokens": 120,
    }
    alone = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stream = client.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
    text = next(iter(stream)).choices[0].text
    with pytest.raises(openai.BadRequestError, match="structured output"):  # its own fault
        client.completions.create(
            model="demo",
            prompt="abc",
            seed=1,
            temperature=2.0,
            max_tokens=400,
            extra_body={"guided_regex": "(.{0,200}a){50}"},
        )
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone


@slow
def test_the_module_form_of_the_operators_room_is_the_same_program(repo: pathlib.Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "server", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=repo,
        env=os.environ,
        timeout=60,
    )
    assert "--served-model-name" in found.stdout
