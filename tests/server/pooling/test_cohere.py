"""/v2/embed: texts in, vectors in several types out, in Cohere's form."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxllm.server.pooling.cohere import RENDERED
from jaxllm.server.requests.large_bodies import MAX_REST
from jaxllm.tokenizer import Tokenizer
from tests.server.conftest import write_tokenizer
from tests.server.pooling.conftest import EMBEDS, MORE, PoolingServer

ASKS = replace(EMBEDS, size=8, normalises=False, prompts=(("query", "Q: "), ("document", "")))


@pytest.fixture(scope="module")
def asking(tokenizer: Tokenizer) -> Iterator[PoolingServer]:
    """An embedding model with a text for queries, and a chat template."""
    with PoolingServer(tokenizer, ASKS) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingServer]:
    """The same without a template."""
    folder = write_tokenizer(tmp_path_factory.mktemp("plain"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with PoolingServer(Tokenizer.load(folder), ASKS) as running:
        yield running


def floats(server: PoolingServer, **body: Any) -> list[list[float]]:
    found: list[list[float]] = server.post("/v2/embed", body).json()["embeddings"]["float"]
    return found


def counted(text: str | bytes) -> list[float]:
    """The vector of the text's bytes."""
    ids = text.encode() if isinstance(text, str) else text
    return [sum(ids), len(ids), 3, *MORE]


def test_texts_are_answered_in_every_type_that_is_asked_for(asking: PoolingServer) -> None:
    body = {"model": "fake", "texts": ["ab", "c"]}
    types = ["float", "base64", "binary", "ubinary"]
    reply = asking.post("/v2/embed", body | {"embedding_types": types}).json()
    assert reply["id"].startswith("embd-")
    assert reply["texts"] == ["ab", "c"] and reply["response_type"] == "embeddings_by_type"
    assert reply["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": 3, "image_tokens": 0},
    }
    found = reply["embeddings"]
    assert found["float"] == [counted("ab"), counted("c")]
    raw = np.frombuffer(base64.b64decode(found["base64"][0]), "<f4")
    np.testing.assert_array_equal(raw, counted("ab"))
    assert found["ubinary"] == [[0b11101010]] * 2
    assert found["binary"] == [[0b11101010 - 128]] * 2
    assert asking.post("/v2/embed", body).json()["embeddings"].keys() == {"float"}


def test_a_vector_may_be_cut(embedder: PoolingServer) -> None:
    (found,) = floats(embedder, texts=["ab"], output_dimension=2)
    np.testing.assert_allclose(found, np.array([195, 2]) / np.hypot(195, 2), atol=1e-6)


def test_texts_that_are_too_long_are_cut_where_they_say(asking: PoolingServer) -> None:
    assert floats(asking, texts=["abcdef"], max_tokens=2) == [counted("ab")]
    assert floats(asking, texts=["abcdef"], max_tokens=2, truncate="START") == [counted("ef")]
    limit = asking.server_state.resolved.max_model_len
    assert floats(asking, texts=["a" * (limit + 9)]) == [counted("a" * limit)]
    for more, field in (({"max_tokens": 2}, "max_tokens"), ({}, "texts")):
        body = {"texts": ["abc" if more else "a" * (limit + 9)], "truncate": "NONE"} | more
        answer = asking.post("/v2/embed", body)
        assert answer.status == 400 and answer.error["param"] == field
        assert "set truncate to END or START" in answer.error["message"]


def test_many_texts_are_more_than_a_body_may_have_beside_its_fields(asking: PoolingServer) -> None:
    texts = ["a" * 2000] * 600
    assert len("".join(texts)) > MAX_REST
    assert floats(asking, texts=texts, max_tokens=2) == [counted("aa")] * 600
    part = {"type": "text", "text": "".join(texts)}
    answer = asking.post("/v2/embed", {"inputs": [{"content": [part]}], "truncate": "NONE"})
    assert answer.status == 400 and answer.error["param"] == "inputs"


def test_a_type_of_inputs_puts_the_models_text_before_them(
    plain: PoolingServer, asking: PoolingServer
) -> None:
    assert floats(plain, texts=["ab"], input_type="query") == [counted("Q: ab")]
    assert floats(plain, texts=["ab"], input_type="document") == [counted("ab")]
    # Where there is a template, it is the system's
    messages = [{"role": "system", "content": "Q: "}, {"role": "user", "content": "ab"}]
    asked = {"messages": messages, "add_generation_prompt": False}
    ids = asking.post("/tokenize", asked).json()["tokens"]
    (found,) = floats(asking, texts=["ab"], input_type="query")
    assert found == [sum(ids), len(ids), 3, *MORE]
    part = {"content": [{"type": "text", "text": "ab"}]}
    assert floats(asking, inputs=[part], input_type="query") == [found]
    assert floats(asking, inputs=[part]) != [found]
    assert floats(asking, texts=["ab"], input_type="document") == [counted("ab")]


def test_few_inputs_of_a_request_wait_to_be_rendered(
    asking: PoolingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, now, most = asking.server_state, 0, 0
    real = state.render

    async def render(*given: Any) -> list[int]:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            return await real(*given)
        finally:
            now -= 1

    monkeypatch.setattr(state, "render", render)
    inputs = [{"content": [{"type": "text", "text": "a" * n}]} for n in range(1, 41)]
    found = floats(asking, inputs=inputs)
    assert most == RENDERED and [vector[1] for vector in found] == sorted(v[1] for v in found)
    assert found[39][1] - found[0][1] == 39


TEXTS: dict[str, Any] = {"texts": ["a"]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "texts is required", "texts"),
    (TEXTS | {"inputs": []}, "in its place", "texts"),
    ({"images": ["data:"]}, "not read", "images"),
    ({"texts": "a"}, "must be a list", "texts"),
    ({"texts": []}, "1 to 1024", "texts"),
    ({"texts": [1]}, "must hold texts", "texts"),
    ({"inputs": [{}]}, "must have content", "inputs"),
    ({"inputs": [{"content": [{"type": "image_url"}]}]}, "type text alone", "inputs"),
    ({"inputs": [{"content": [{"type": "text"}]}]}, "without a text", "inputs"),
    (TEXTS | {"input_type": "clustering"}, "has query, document", "input_type"),
    (TEXTS | {"embedding_types": ["int8"]}, "some of float, base64", "embedding_types"),
    (TEXTS | {"embedding_types": [[]]}, "some of float, base64", "embedding_types"),
    (
        TEXTS | {"embedding_types": ["binary"], "output_dimension": 3},
        "do not fill whole bytes",
        "embedding_types",
    ),
    (TEXTS | {"output_dimension": 9}, "output_dimension is 9", "output_dimension"),
    (TEXTS | {"max_tokens": 0}, "from 1 to", "max_tokens"),
    (TEXTS | {"truncate": "MIDDLE"}, "END or START or NONE", "truncate"),
    (TEXTS | {"priority": 1}, "--scheduling-policy", "priority"),
]


@pytest.mark.parametrize(
    ("body", "message", "param"), BAD, ids=[f"{n}-{b[2]}" for n, b in enumerate(BAD)]
)
def test_a_bad_body_is_one_error_that_names_the_field(
    body: dict[str, Any], message: str, param: str, asking: PoolingServer
) -> None:
    answer = asking.post("/v2/embed", body)
    assert answer.status == 400
    assert message in answer.error["message"] and answer.error["param"] == param


def test_what_a_model_does_not_have_is_refused(
    plain: PoolingServer, embedder: PoolingServer, classifier: PoolingServer
) -> None:
    error = embedder.post("/v2/embed", TEXTS | {"input_type": "query"}).error
    assert "this model has none" in error["message"]
    part = {"content": [{"type": "text", "text": "ab"}]}
    error = plain.post("/v2/embed", {"inputs": [part]}).error
    assert "no chat template" in error["message"] and error["param"] == "inputs"
    assert classifier.post("/v2/embed", TEXTS).error["code"] == "wrong_task"


def test_body_and_reply_are_as_the_openapi_document_says(asking: PoolingServer) -> None:
    document = asking.get("/openapi.json").json()
    said = document["paths"]["/v2/embed"]["post"]
    part = {"content": [{"type": "text", "text": "ab"}]}
    for body in (TEXTS | {"embedding_types": ["float", "binary"]}, {"inputs": [part]}):
        reply = asking.post("/v2/embed", body).json()
        for schema, value in (
            (said["requestBody"]["content"], body),
            (said["responses"]["200"]["content"], reply),
        ):
            checked = {"components": document["components"]} | schema["application/json"]["schema"]
            jsonschema.Draft202012Validator(checked).validate(value)
