"""Large bodies are read as small ones are, some bytes at a time, and what no legal request holds is
refused before it is read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.sampling.options import MAX_ALLOWED
from jaxllm.server.app import BODY_FIELDS
from jaxllm.server.errors import ApiError
from jaxllm.server.requests import large_bodies as module
from jaxllm.server.requests.body_fields import BodyFields, joined
from jaxllm.server.requests.large_bodies import (
    LARGE,
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_MEMBERS,
    MAX_TRUNCATED_IDS,
    LargeBodies,
    Shape,
    least_chars,
    shape_of,
)
from jaxllm.server.requests.limits import Rules
from tests.server import fake
from tests.server.harness import Running, post_head

RULES = Rules(
    resolved=replace(fake.RESOLVED, vocab_size=200_000, max_model_len=5000),
    served=("fake",),
    longest_token=10,
)
texts = st.text(st.sampled_from('ab"\\[]{},: \n€😀'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9**9) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def read_large(body: bytes, fields: BodyFields = BODY_FIELDS) -> dict[str, Any]:
    """The object of a body, read as large ones are."""
    return asyncio.run(LargeBodies(fields, RULES).read(body))


def counted(value: Any) -> Shape:
    """The shape of `value`, found by walking it."""
    shape = Shape()
    if isinstance(value, (list, dict)):
        inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
        shape = Shape(1, 0 if isinstance(value, list) else len(value), max(0, len(value) - 1))
        for one in inner:
            shape = Shape(
                shape.containers + one.containers,
                shape.members + one.members,
                shape.commas + one.commas,
            )
    return shape


@given(values, st.sampled_from([None, 0, 3]), st.booleans(), st.integers(1, 9))
def test_parts_are_counted_wherever_a_text_is_cut(
    value: Any, indent: int | None, ascii_only: bool, turn: int
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    compact = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TURN", turn)
        found = asyncio.run(shape_of(written))
    assert found == replace(counted(value), size=len(compact))


@given(texts | st.text(), st.booleans(), st.integers(1, 9))
def test_no_text_has_fewer_characters_than_are_counted_wherever_it_is_cut(
    text: str, ascii_only: bool, turn: int
) -> None:
    written = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TURN", turn)
        found = asyncio.run(least_chars(written))
    assert found <= len(text)
    if b"\\u" not in written and b"\\\\" not in written:
        assert found == len(text)


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "stop", "messages", "tokens"]) | texts, values, max_size=5
    ),
    st.sampled_from([None, 2]),
)
def test_a_large_body_is_read_as_a_small_one(value: dict[str, Any], indent: int | None) -> None:
    assert read_large(json.dumps(value, indent=indent).encode()) == value


@given(
    st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=5), st.sampled_from([None, 0, 2])
)
def test_lists_of_ids_are_read_one_after_the_other(
    ids: list[list[int]], indent: int | None
) -> None:
    body = json.dumps({"prompt": ids, "n": 1}, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", 1)
        patch.setattr(module, "TURN", 4)
        fields = joined(BODY_FIELDS, BodyFields(sizes={"n": None}))
        assert read_large(body, fields) == {"prompt": ids, "n": 1}


@given(
    st.lists(st.integers(-300, 300) | st.none() | st.booleans() | st.floats(-9, 9), max_size=9),
    st.sampled_from([None, 0, 2]),
)
def test_lists_of_plain_values_are_read_piece_by_piece(
    items: list[Any], indent: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", 1)
        patch.setattr(module, "TURN", 4)
        fields = joined(BODY_FIELDS, BodyFields(sizes={"stop": None}))
        body = json.dumps({"stop": items}, indent=indent).encode()
        assert read_large(body, fields) == {"stop": items}


def test_each_of_many_prompts_may_be_as_long_as_the_context_allows() -> None:
    ids = [[100_000] * (RULES.resolved.max_model_len - 1)] * 40
    body = json.dumps({"prompt": ids}).encode()
    assert len(body) > LARGE
    assert read_large(body) == {"prompt": ids}


@pytest.mark.parametrize(
    "ids",
    [[[123_456] * 200_000], [[1, 2], [123_456] * 200_000, [], [123_456] * 200_000]],
    ids=["one", "some"],
)
def test_a_long_list_of_ids_is_read_in_many_turns(
    ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watched(monkeypatch)
    body = json.dumps({"prompt": ids, "truncate_prompt_tokens": 2}).encode()
    assert read_large(body)["prompt"] == ids
    assert max(reads) < 1.1 * module.TURN


@pytest.mark.parametrize("turn", [1, module.TURN])
@pytest.mark.parametrize(
    "prompt",
    [
        "[[1],2]",
        "[[[1]],[1]]",
        '[[1],{"a":[1]}]',
        '[["]"]]',
        '[["a","b,c"]]',
        "[[1],[1,2],true]",
        "[[1],{},[1]]",
    ],
)
def test_lists_of_anything_else_are_not(
    prompt: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(module, "TURN", turn)
    with pytest.raises(ApiError, match="must not mix") as error:
        read_large(b'{"prompt":%b}' % prompt.encode())
    assert (error.value.status, error.value.param) == (400, "prompt")


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are read, each time that some are."""
    real, reads = orjson.loads, []

    def loads(text: bytes) -> Any:
        reads.append(len(text))
        return real(text)

    monkeypatch.setattr(orjson, "loads", loads)
    return reads


def refused(body: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str | None]:
    """Why a body is refused, of which no more than a turn's worth was read."""
    reads = watched(monkeypatch)
    with pytest.raises(ApiError) as error:
        read_large(body)
    assert error.value.status == 400 and max(reads, default=0) <= module.TURN
    return error.value.message, error.value.param


MANY = 2 << 20
HOSTILE: dict[str, tuple[bytes, str, str | None]] = {
    "empty lists in a prompt": (
        b'{"prompt":[' + b"[]," * MANY + b"[]]}",
        f"at most {MAX_CONTAINERS} lists",
        "prompt",
    ),
    "and elsewhere": (
        b'{"prompt":"a","x":[' + b"[]," * MANY + b"[]]}",
        f"at most {MAX_CONTAINERS} lists",
        None,
    ),
    "more of them": (
        b'{"prompt":[' + b"[]," * (4 << 20) + b"[]]}",
        f"at most {MAX_CONTAINERS} lists",
        None,
    ),
    "empty objects": (
        b'{"messages":[' + b"{}," * MANY + b"{}]}",
        f"at most {MAX_CONTAINERS} lists",
        "messages",
    ),
    "members": (
        b'{"logit_bias":{' + b'"1":1,' * (MANY // 2) + b'"1":1}}',
        f"{MAX_MEMBERS} members",
        "logit_bias",
    ),
    "messages": (
        b'{"messages":[' + b"1," * MANY + b"1]}",
        f"more than {MAX_ITEMS} parts",
        "messages",
    ),
    "texts": (b'{"prompt":[' + b'"",' * MANY + b'""]}', "at most 1024 prompts", "prompt"),
    "ids": (b'{"prompt":[' + b"1," * MANY + b"1]}", "maximum context length is 5000", "prompt"),
    "ids in lists": (
        b'{"prompt":[[1],[' + b"1," * MANY + b"1]]}",
        "maximum context length is 5000",
        "prompt",
    ),
    "many lists": (
        b'{"prompt":[' + (b"[" + b"1," * 200 + b"1],") * 20_000 + b"[1]]}",
        "at most 1024 prompts",
        "prompt",
    ),
    "ids to be truncated": (
        b'{"truncate_prompt_tokens":1,"prompt":[' + b"1," * MANY + b"1]}",
        f"at most {MAX_TRUNCATED_IDS} are read",
        "prompt",
    ),
    "tokens": (b'{"tokens":[' + b"1," * MANY + b"1]}", "maximum context length is 5000", "tokens"),
    "an object as prompt": (b'{"prompt":{"a":[' + b"1," * MANY + b"1]}}", "prompt", "prompt"),
    "a value": (
        b'{"stop":[' + b"1," * MANY + b"1]}",
        "no legal value has more than 1048576",
        "stop",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_legal_request_holds_is_refused_unread(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, says, param = HOSTILE[name]
    message, named = refused(body, monkeypatch)
    assert says in message and named == param


def test_blanks_do_not_count() -> None:
    body = {
        "allowed_token_ids": list(range(MAX_ALLOWED)),
        "logit_bias": {str(id): 1 for id in range(1024)},
    }
    ids = json.dumps(body["allowed_token_ids"]).replace(" ", "\n" + " " * 16)
    biases = json.dumps(body["logit_bias"]).replace(" ", " " * 600)
    assert len(ids) > 12 * MAX_ALLOWED and len(biases) > LARGE
    written = f'{{"allowed_token_ids":{ids},"logit_bias":{biases}}}'.encode()
    assert read_large(written) == body


def test_bodies_of_all_connections_hold_so_much_at_a_time(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh.server_state.bodies, "_total", 5000)
    data = json.dumps(
        {"model": "fake", "prompt": "abc", "max_tokens": 1, "user": "x" * 4500}
    ).encode()
    head = post_head("/v1/completions", len(data))
    with fresh.begin_raw(head + data[:4000]) as first:
        while fresh.server_state.bodies.bytes_read < 4000:
            assert fresh.get("/version").status == 200
        refused = fresh.post(
            "/v1/completions", {"model": "fake", "prompt": "abc", "user": "x" * 2000}
        )
        assert (refused.status, refused.error["code"]) == (503, "bodies_full")
        assert "5000 bytes" in refused.error["message"] and refused.headers["retry-after"]
        assert (
            fresh.post(
                "/v1/completions", {"model": "fake", "prompt": "abc", "max_tokens": 1}
            ).status
            == 200
        )
        first.send(data[4000:])
        assert first.status() == 200
    with fresh.begin_raw(head + data[:4000]):
        while fresh.server_state.bodies.bytes_read < 4000:
            assert fresh.get("/version").status == 200
    while fresh.server_state.bodies.bytes_read:  # who goes takes what was held along
        assert fresh.get("/version").status == 200


def test_dialects_agree_about_the_fields_that_they_share() -> None:
    both = joined(
        BodyFields(names=frozenset({"n"}), sizes={"prompt": None}, prompts=frozenset({"prompt"})),
        BodyFields(sizes={"prompt": None, "tokens": 9}, token_ids=frozenset({"tokens"})),
    )
    assert both.known == {"n", "prompt", "tokens"}
    assert dict(both.sizes) == {"prompt": None, "tokens": 9}
    assert (both.prompts, both.token_ids, both.messages) == ({"prompt"}, {"tokens"}, set())
    with pytest.raises(ValueError, match="tokens has two sizes: 9 and None"):
        joined(both, BodyFields(sizes={"tokens": None}))
