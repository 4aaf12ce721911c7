"""POST /generate in vLLM's and in SGLang's form. The engine repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Answer, Running
from tests.server.stepped import Stepped


def lines(answer: Answer) -> list[dict[str, Any]]:
    """The objects of a stream of lines."""
    return [json.loads(line) for line in answer.body.splitlines()]


def test_vllms_form_answers_with_prompt_and_text(server: Running) -> None:
    answer = server.post("/generate", {"prompt": "abc", "max_tokens": 2, "temperature": 0})
    assert answer.json() == {"text": ["abcab"]}


def test_vllms_form_has_a_text_per_choice(server: Running) -> None:
    answer = server.post("/generate", {"prompt": "abc", "n": 2, "max_tokens": 1})
    assert answer.json() == {"text": ["abca", "abca"]}


def test_vllms_stream_ends_with_the_whole_answer(server: Running) -> None:
    body = {"prompt": "abc", "n": 2, "max_tokens": 3}
    streamed = server.post("/generate", body | {"stream": True})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    found = lines(streamed)
    assert found[-1] == server.post("/generate", body).json()
    assert all("".join(one["text"]).startswith("abc") for one in found)


def test_vllms_form_takes_token_ids_and_shows_their_text(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": "xyz"}).json()["tokens"]
    answer = server.post("/generate", {"prompt": ids, "max_tokens": 1})
    assert answer.json() == {"text": ["xyzx"]}


def test_sglangs_form_answers_with_text_ids_and_counts(server: Running) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    found = server.post("/generate", body).json()
    meta = found.pop("meta_info")
    ids = server.post("/tokenize", {"prompt": "ab"}).json()["tokens"]
    assert found == {"text": "ab", "output_ids": ids}
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 2, 0)
    assert meta["e2e_latency"] >= 0 and isinstance(meta["id"], str)


def test_sglangs_form_takes_token_ids(server: Running) -> None:
    body = {"input_ids": [97, 98], "sampling_params": {"max_new_tokens": 2}}
    assert server.post("/generate", body).json()["output_ids"] == [97, 98]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"text": ["abc", "de"]}, ["abc", "de"]),
        ({"text": ["abc"]}, ["abc"]),
        ({"text": "abc", "sampling_params": {"n": 2}}, ["abc", "abc"]),
        ({"input_ids": [[97], [98, 99]]}, None),
    ],
)
def test_sglangs_lists_are_answered_by_lists(
    server: Running, body: dict[str, Any], texts: list[str] | None
) -> None:
    whole = server.post("/generate", body).json()
    assert texts is None or [one["text"] for one in whole] == texts
    last: dict[int, dict[str, Any]] = {}
    for event in server.post("/generate", body | {"stream": True}).events():
        last[event.pop("index")] = event
    streamed = [last[index] for index in range(len(whole))]
    for one in (*whole, *streamed):
        del one["meta_info"]["id"], one["meta_info"]["e2e_latency"]
    assert streamed == whole


def test_sglangs_stream_repeats_the_text_so_far(server: Running) -> None:
    events = server.post("/generate", {"text": "abc", "stream": True}).events()
    assert [event["text"] for event in events] == ["a", "ab", "abc"]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "stop", "matched": None}]


def test_sglangs_names_of_options_reach_the_engine(server: Running) -> None:
    sampling = {
        "max_new_tokens": 7.0,
        "min_new_tokens": 1,
        "no_stop_trim": True,
        "sampling_seed": 5,
        "stop": ["b"],
        "top_k": -1,
        "repetition_penalty": None,
    }
    found = server.post("/generate", {"text": "abc", "sampling_params": sampling}).json()
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"}
    params = server.control.added[-1].params
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 1, 5)
    assert params.include_stop_str_in_output


def test_sglangs_default_is_128_new_tokens(server: Running) -> None:
    server.post("/generate", {"text": "abc"})
    assert server.control.added[-1].params.max_tokens == 128


def test_sglangs_schema_is_json_text(server: Running) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    for value in (schema, json.loads(schema)):
        body = {"text": "abc", "sampling_params": {"json_schema": value, "max_new_tokens": 1}}
        assert server.post("/generate", body).status == 200
        assert server.control.added[-1].grammar
    for name in ("json_schema", "structural_tag"):
        wrong = server.post("/generate", {"text": "abc", "sampling_params": {name: "{"}})
        assert wrong.error["param"] == f"sampling_params.{name}"


def test_an_error_names_the_option_once(server: Running) -> None:
    wrong = server.post("/generate", {"text": "abc", "sampling_params": {"n": 1000}})
    assert wrong.error["message"] == "sampling_params.n must be in [1, 128], got 1000"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "text": "b"}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": [1, 2]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [1, 999_999]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": ""}, "text"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 0}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"unheard_of": 2}}, "sampling_params.unheard_of"),
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "image_data": "http://x"}, "image_data"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "sampling_params"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "echo": False}, "echo"),
        ({"prompt": "a", "return_token_ids": True}, "return_token_ids"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
            "stream_options",
        ),
        ({"prompt": "a", "return_logprob": True}, "return_logprob"),
        ({"prompt": "a", "lora_path": "b"}, "lora_path"),
        ({"text": "a", "return_token_ids": True}, "return_token_ids"),
        ({"text": "a", "cache_salt": "b"}, "cache_salt"),
        ({"text": "a", "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"text": "a", "suffix": "b"}, "suffix"),
        ({"text": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"text": "a", "temperature": 0.5}, "temperature"),
        ({"text": "a", "guided_regex": "a"}, "guided_regex"),
        ({"text": "a", "priority": 1}, "priority"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    server: Running, body: dict[str, Any], param: str
) -> None:
    answer = server.post("/generate", body)
    assert answer.status == 400 and answer.error["param"] == param


def test_fields_that_request_nothing_are_taken(server: Running) -> None:
    sglang = {"text": "a", "user": "b", "rid": "c", "cache_salt": None, "lora_path": None}
    vllm = {"prompt": "a", "user": "b", "return_logprob": False, "top_logprobs_num": 0}
    for body in (sglang, vllm):
        assert server.post("/generate", body).status == 200


def test_no_model_need_be_named(server: Running) -> None:
    assert server.post("/generate", {"text": "a"}).status == 200
    assert server.post("/generate", {"text": "a", "model": "other"}).status == 404


def test_a_step_that_fails_ends_vllms_stream_with_a_line(tokenizer: Tokenizer) -> None:
    with Stepped(tokenizer) as server:
        body = {"prompt": "abcdef", "stream": True}
        with server.begin("/generate", body) as stream:
            server.control.step_until(lambda: stream.readable())
            server.control.fail_step = "broken"
            server.control.step_until(lambda: server.server_state.client.in_flight == 0)
            assert stream.status() == 200
            last = next(line for line in iter(stream.line, b"") if b'"error"' in line)
            assert json.loads(last)["error"]["type"] == "server_error"
