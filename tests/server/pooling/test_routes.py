"""The pooling routes: OpenAI's client, vLLM's shapes, one error for what is wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonschema
import ml_dtypes
import numpy as np
import openai
import pytest

from jaxllm.server.lifecycle.served_model import ServedModel
from jaxllm.server.parsing.formats import format_name
from jaxllm.server.pooling.requests import MAX_DESCRIBED
from tests.server.harness import Running
from tests.server.pooling.conftest import PoolingServer

INPUTS: list[tuple[Any, list[list[int]]]] = [
    ("ab", [[97, 98]]),
    (["a", "b"], [[97], [98]]),
    ([97, 98], [[97, 98]]),
    ([[97], [98, 99]], [[97], [98, 99]]),
]
FORMS = ["text", "texts", "ids", "lists of ids"]


def vector(ids: list[int]) -> np.ndarray:
    """What the engine pools, normalised."""
    found = np.array([sum(ids), len(ids), 3], np.float32)
    return found / np.linalg.norm(found)


@pytest.mark.parametrize(("given", "prompts"), INPUTS, ids=FORMS)
def test_openais_client_gets_the_vectors_in_order(
    given: Any, prompts: list[list[int]], embeddings_client: openai.OpenAI
) -> None:
    # The client asks for base64 by itself
    reply = embeddings_client.embeddings.create(model="fake", input=given)
    assert [each.index for each in reply.data] == list(range(len(prompts)))
    for each, ids in zip(reply.data, prompts, strict=True):
        np.testing.assert_allclose(each.embedding, vector(ids), atol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
    plain = embeddings_client.embeddings.create(model="fake", input=given, encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(reply.data[0].embedding)


def test_inputs_that_come_as_token_ids_are_told_of_once(
    embedder: PoolingServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "jaxllm.server"):
        for given in ("ab", [97, 98], [[97], [98]], [97]):
            assert embedder.post("/pooling", {"input": given, "model": "fake"}).status == 200
    assert [line for line in caplog.messages if "check_embedding_ctx_length=False" in line] == [
        caplog.messages[0]
    ]


def test_a_reply_has_vllms_shape_and_base64_is_little_endian(embedder: PoolingServer) -> None:
    body = {"input": "ab", "encoding_format": "base64", "model": "fake"}
    reply = embedder.post("/v1/embeddings", body).json()
    assert reply["id"].startswith("embd-") and reply["object"] == "list"
    (data,) = reply["data"]
    assert (data["index"], data["object"]) == (0, "embedding")
    raw = np.frombuffer(base64.b64decode(data["embedding"]), "<f4")
    np.testing.assert_allclose(raw, vector([97, 98]), atol=1e-6)


def test_formats_of_chats_are_told_of_models_that_chat_alone(
    embedder: PoolingServer, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    model = object.__new__(ServedModel)  # it would start engines
    model.name = "m"
    with caplog.at_level("INFO", "jaxllm.server"):
        model.state = embedder.server_state
        model.announce()
        assert not caplog.messages
        model.state = server.server_state
        model.announce()
    [message] = caplog.messages
    formats = server.server_state.formats
    assert f"reasoning as {format_name(formats.reasoning)} (" in message
    assert f"tool calls as {format_name(formats.tools)} (" in message


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
    ],
)
def test_numbers_are_rounded_and_their_bytes_ordered_as_asked(
    name: str, dtype: Any, embedder: PoolingServer
) -> None:
    body, wanted = {"input": "ab", "embed_dtype": name}, vector([97, 98]).astype(dtype)
    plain = embedder.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.array(plain, np.float32), wanted.astype(np.float32))
    body |= {"encoding_format": "base64"}
    for order, turned in (("native", False), ("little", False), ("big", True)):
        reply = embedder.post("/v1/embeddings", body | {"endianness": order}).json()
        words = np.frombuffer(
            base64.b64decode(reply["data"][0]["embedding"]), f"u{wanted.itemsize}"
        )
        own = words.byteswap() if turned else words
        np.testing.assert_array_equal(own, wanted.view(own.dtype))


@pytest.mark.parametrize("form", ["bytes", "bytes_only"])
@pytest.mark.parametrize(
    ("path", "dtype", "order"),
    [("/v1/embeddings", "float32", "<f4"), ("/pooling", "float16", ">f2")],
)
def test_bytes_of_vectors_are_described_in_a_header_if_asked(
    form: str, path: str, dtype: str, order: str, embedder: PoolingServer
) -> None:
    endianness = "big" if order[0] == ">" else "native"
    body = {"input": ["ab", "c"], "embed_dtype": dtype, "endianness": endianness}
    answer = embedder.post(path, body | {"encoding_format": form})
    assert answer.headers["content-type"] == "application/octet-stream"
    wanted = np.stack([vector([97, 98]), vector([99])]).astype(order)
    np.testing.assert_array_equal(np.frombuffer(answer.body, order).reshape(2, 3), wanted)
    if form == "bytes_only":
        assert "metadata" not in answer.headers
        return
    metadata = json.loads(answer.headers["metadata"])
    assert metadata.keys() == {"id", "created", "model", "data", "usage"}
    assert metadata["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    size, like = 3 * wanted.itemsize, {"embed_dtype": dtype, "endianness": endianness}
    assert metadata["data"] == [
        {"index": 0, "start": 0, "end": size, "shape": [3]} | like,
        {"index": 1, "start": size, "end": 2 * size, "shape": [3]} | like,
    ]


def test_bytes_of_every_token_have_two_axes(token_embedder: PoolingServer) -> None:
    answer = token_embedder.post("/pooling", {"input": "ab", "encoding_format": "bytes"})
    (found,) = json.loads(answer.headers["metadata"])["data"]
    assert found["shape"] == [2, 3] and found["end"] == len(answer.body) == 24


def test_more_bytes_than_a_header_describes_come_without_one(embedder: PoolingServer) -> None:
    body = {"input": ["a"] * (MAX_DESCRIBED + 1), "encoding_format": "bytes"}
    error = embedder.post("/v1/embeddings", body).error
    assert "ask for bytes_only" in error["message"] and error["param"] == "encoding_format"
    fits = embedder.post("/v1/embeddings", body | {"input": ["a"] * MAX_DESCRIBED})
    assert len(fits.headers["metadata"]) < 1 << 16
    answer = embedder.post("/v1/embeddings", body | {"encoding_format": "bytes_only"})
    assert len(answer.body) == 12 * (MAX_DESCRIBED + 1)


def test_dimensions_and_raw_vectors(embedder: PoolingServer) -> None:
    cut = embedder.post("/v1/embeddings", {"input": "ab", "dimensions": 2}).json()
    assert np.linalg.norm(cut["data"][0]["embedding"]) == pytest.approx(1)
    raw = embedder.post("/v1/embeddings", {"input": "ab", "normalize": False}).json()
    assert raw["data"][0]["embedding"] == [195, 2, 3]


def test_truncation_keeps_the_side_that_is_asked_for(embedder: PoolingServer) -> None:
    body = {"input": "abcdef", "normalize": False, "truncate_prompt_tokens": 2}
    right = embedder.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    left = embedder.post("/v1/embeddings", body | {"truncation_side": "left"}).json()
    assert (right, left["data"][0]["embedding"]) == ([97 + 98, 2, 3], [101 + 102, 2, 3])


def test_a_conversation_is_rendered(embedder: PoolingServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked, lengths = {"messages": messages, "normalize": False}, set()
    for begins in (False, True):  # an answer, which a vector's conversation has by request alone
        body = {"messages": messages, "add_generation_prompt": begins}
        rendered = embedder.post("/tokenize", body).json()["tokens"]
        reply = embedder.post("/v1/embeddings", asked | ({} if not begins else body)).json()
        assert reply["data"][0]["embedding"] == [sum(rendered), len(rendered), 3]
        lengths.add(len(rendered))
    assert len(lengths) == 2


def test_pooling_gives_the_data_of_either_task(
    embedder: PoolingServer, classifier: PoolingServer
) -> None:
    reply = embedder.post("/pooling", {"input": "ab", "task": "embed"}).json()
    assert reply["id"].startswith("pool-") and reply["data"][0]["object"] == "pooling"
    np.testing.assert_allclose(reply["data"][0]["data"], vector([97, 98]), atol=1e-6)
    probs = classifier.post("/pooling", {"input": [1, 2]}).json()["data"][0]["data"]
    assert sum(probs) == pytest.approx(1)


def test_pooling_gives_a_vector_of_every_token(token_embedder: PoolingServer) -> None:
    body = {"input": ["ab", "c"], "task": "token_embed"}
    data = token_embedder.post("/pooling", body).json()["data"]
    assert [each["data"] for each in data] == [[[97, 2, 3], [98, 2, 3]], [[99, 1, 3]]]
    packed = token_embedder.post("/pooling", body | {"encoding_format": "base64"}).json()["data"]
    rows = np.frombuffer(base64.b64decode(packed[0]["data"]), "<f4").reshape(-1, 3)
    np.testing.assert_array_equal(rows, [[97, 2, 3], [98, 2, 3]])
    error = token_embedder.post("/v1/embeddings", {"input": "ab"}).error
    assert error["code"] == "wrong_task" and "--pooler-config" in error["message"]


def test_classify_names_the_likeliest_label(classifier: PoolingServer) -> None:
    reply = classifier.post("/classify", {"input": ["\x01", "\x01\x01\x01\x01"]}).json()
    assert reply["id"].startswith("classify-")
    first, second = reply["data"]
    assert (first["label"], first["num_classes"], first["index"]) == ("three", 3, 0)
    assert sum(second["probs"]) == pytest.approx(1)
    raw = classifier.post("/classify", {"input": "ab", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == [195, 2, 3]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")],
    ids=["documents", "text", "data", "items"],
)
def test_a_score_has_many_names(path: str, one: str, other: str, reranker: PoolingServer) -> None:
    reply = reranker.post(path, {one: "a", other: ["b", "c"]}).json()
    assert reply["id"].startswith("score-")
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": 97 + 98},
        {"index": 1, "object": "score", "score": 97 + 99},
    ]
    paired = reranker.post(path, {one: ["a", "b"], other: ["b", "c"]}).json()["data"]
    assert [each["score"] for each in paired] == [97 + 98, 98 + 99]


def test_an_embedding_model_scores_by_the_cosine(embedder: PoolingServer) -> None:
    data = embedder.post("/score", {"text_1": "a", "text_2": ["a", "bc"]}).json()["data"]
    expected = [1.0, float(vector([97]) @ vector([98, 99]))]
    assert [each["score"] for each in data] == pytest.approx(expected)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_puts_the_best_first(path: str, reranker: PoolingServer) -> None:
    body = {"query": "a", "documents": ["b", {"text": "d"}, "c"], "top_n": 2}
    reply = reranker.post(path, body).json()
    assert reply["results"] == [
        {"index": 1, "document": {"text": "d"}, "relevance_score": 97 + 100},
        {"index": 2, "document": {"text": "c"}, "relevance_score": 97 + 99},
    ]
    assert reply["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    everything = reranker.post(path, body | {"top_n": 0}).json()["results"]
    assert [each["index"] for each in everything] == [1, 2, 0]


def test_documents_are_cut_to_their_limit(reranker: PoolingServer) -> None:
    body = {"query": "a", "documents": ["bcd"], "max_tokens_per_doc": 1}
    assert reranker.post("/rerank", body).json()["usage"]["prompt_tokens"] == 2


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {}, "input is required", "input"),
    ("/v1/embeddings", {"input": []}, "1 to 1024", "input"),
    ("/v1/embeddings", {"input": ""}, "not be empty", "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "not be empty", "input"),
    ("/v1/embeddings", {"input": ["a", [97]]}, "must not mix", "input"),
    ("/v1/embeddings", {"input": [97, True]}, "must hold token ids", "input"),
    ("/v1/embeddings", {"input": [97, 10**6]}, "outside the vocabulary", "input"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input must be", "input"),
    ("/v1/embeddings", {"input": "a" * 300}, "maximum context length", "input"),
    ("/v1/embeddings", {"input": [97] * 300}, "maximum context length", "input"),
    ("/v1/embeddings", {"input": "a", "messages": []}, "exclude each other", "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 4}, "from 1 to 3", "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": "2"}, "an integer", "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "hex", "encoding_format"),
    (
        "/classify",
        {"input": "a", "encoding_format": "bytes"},
        "must be float, got",
        "encoding_format",
    ),
    ("/classify", {"input": "a", "embed_dtype": "float16"}, "not supported", "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "int8"}, "must be float32 or", "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "endianness": "odd"}, "little or big", "endianness"),
    ("/score", {"text_1": "a", "text_2": "b", "endianness": "big"}, "endianness", "endianness"),
    (
        "/v1/embeddings",
        {"input": "a", "truncate_prompt_tokens": 0},
        "from 1 to",
        "truncate_prompt_tokens",
    ),
    ("/v1/embeddings", {"input": "a", "truncation_side": "x"}, "left or right", "truncation_side"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, "--scheduling-policy", "priority"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt", "cache_salt"),
    ("/pooling", {"input": "a", "task": "token_embed"}, "for (token_embed); ask for that", None),
    ("/pooling", {"input": "a", "task": "plan"}, "must be one of embed", "task"),
    ("/score", {"text_1": "a"}, "are required", "queries"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "cannot be paired", "text_1"),
    ("/score", {"text_1": "a", "text_2": [1]}, "must hold texts", "text_2"),
    ("/score", {"text_1": "", "text_2": "a"}, "text_1 has no tokens", "text_1"),
    ("/score", {"data_1": "a", "data_2": ["b", ""]}, "data_2 has no tokens", "data_2"),
    ("/rerank", {"query": "a" * 300, "documents": ["b"]}, "maximum context length", "query"),
    ("/rerank", {"query": "a"}, "documents is required", "documents"),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "query must be a text", "query"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n"),
]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"), BAD, ids=[f"{at}-{p[3]}" for at, p in enumerate(BAD)]
)
def test_a_bad_body_is_one_error_that_names_the_field(
    path: str, body: dict[str, Any], message: str, param: str, embedder: PoolingServer
) -> None:
    answer = embedder.post(path, body)
    assert answer.status == 400
    assert message in answer.error["message"] and answer.error["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
    ids=["embeddings", "pooling", "classify", "score", "rerank"],
)
def test_a_generating_model_refuses_to_pool(
    path: str, body: dict[str, Any], server: Running
) -> None:
    error = server.post(path, body).error
    assert error["code"] == "wrong_runner" and "--runner pooling" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
    ids=["completions", "chat", "native", "responses"],
)
def test_a_pooling_model_refuses_to_generate(
    path: str, body: dict[str, Any], embedder: PoolingServer
) -> None:
    answer = embedder.post(path, {"model": "fake"} | body)
    assert answer.status == 400 and "generates nothing" in answer.body.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/pooling", {"input": ["a", "b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
    ids=["floats", "base64", "pooling", "score", "rerank"],
)
def test_a_reply_is_as_the_openapi_document_says(
    path: str, body: dict[str, Any], embedder: PoolingServer
) -> None:
    document = embedder.get("/openapi.json").json()
    said = document["paths"][path]["post"]
    components = {"components": document["components"]}
    for schema, value in (
        (said["requestBody"]["content"], body),
        (said["responses"]["200"]["content"], embedder.post(path, body).json()),
    ):
        checked = schema["application/json"]["schema"]
        jsonschema.Draft202012Validator(components | checked).validate(value)


def test_tasks_that_the_model_does_not_do_are_refused(
    embedder: PoolingServer, classifier: PoolingServer
) -> None:
    assert embedder.post("/classify", {"input": "a"}).error["code"] == "wrong_task"
    assert classifier.post("/v1/embeddings", {"input": "a"}).error["code"] == "wrong_task"
    error = classifier.post("/score", {"text_1": "a", "text_2": "b"}).error
    assert "one label" in error["message"]
