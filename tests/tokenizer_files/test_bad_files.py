"""Files that hold no usable tokenizer: one line that names the file and what is wrong."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import ConfigError
from jaxllm.tokenizer import Tokenizer
from jaxllm.tokenizer_files.charsmap import check_charsmap
from jaxllm.tokenizer_files.pieces import read_model
from tests.tokenizer_files.test_formats import GOLDENS

LLAMA = (GOLDENS / "llama" / "tokenizer.model").read_bytes()
GLM4 = (GOLDENS / "glm4" / "tokenizer.model").read_bytes()
UNIGRAM = (GOLDENS / "unigram" / "tokenizer.model").read_bytes()


def field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol buffer, small enough for one byte of length."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def piece(text: bytes, kind: int = 1) -> bytes:
    """An entry of a SentencePiece model."""
    return field(1, field(1, text) + field(3, kind))


def line(token: bytes, rank: int) -> bytes:
    """A line of a tiktoken file."""
    return base64.b64encode(token) + b" %d\n" % rank


def failure(directory: pathlib.Path) -> str:
    """The error of loading."""
    with pytest.raises(ConfigError) as error:
        Tokenizer.load(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LLAMA[:-3], "ends within a"),
        (LLAMA[:1], "ends within a number"),
        (LLAMA + piece(b"a"), "a piece is there twice"),
        (b"\n\x00", "a piece has 0 bytes"),
        (piece(b"\xff") + LLAMA, "utf-8"),
        (piece(b"new", 9) + LLAMA, "9 is not a valid Kind"),
        (piece(b"new", 2) + LLAMA, "not exactly one piece for what is unknown"),
        (LLAMA + field(2, field(3, 3)), "algorithm is 3; only unigram"),
        (LLAMA + field(2, field(24, 1)[:0] + b"\xc0\x01\x01"), "spaces behind words"),
        (LLAMA + field(3, field(5, 0)), "neither runs"),
        (LLAMA + field(3, field(2, b"\x08\x00\x00\x00abcd")), "map of characters is cut off"),
        (LLAMA + field(3, field(2, struct.pack("<II", 4, 9 << 10))), "points out of itself"),
        (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than ten bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_sentencepiece_model_is_one_readable_error(
    tmp_path: pathlib.Path, data: bytes, said: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    message = failure(tmp_path)
    assert said in message and "tokenizer.model holds no usable tokenizer" in message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (GLM4 + line(b"a", 999), "twice"),
        (GLM4 + line(b"quite new", 7), "twice"),
        (GLM4 + b"====", "line 421 is not a token in base64"),
        (GLM4 + b"YQ== x", "line 421 is not a token in base64"),
        (GLM4 + line(b"new", 2**40), "outside 0 to"),
        (GLM4 + line(b"x" * 2000, 999), "more than 1024 bytes"),
        (GLM4[GLM4.index(b"\n") + 1 :], "1 of the 256 single bytes have no token"),
        (b"\xff\xfe", "line 1 is not a token"),
        (b"", "256 of the 256"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_tiktoken_file_is_one_readable_error(
    tmp_path: pathlib.Path, data: bytes, said: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLM4Tokenizer"}')
    assert said in failure(tmp_path)


def tekken(**config: Any) -> dict[str, Any]:
    """The golden's file, with other settings."""
    content = json.loads((GOLDENS / "tekken" / "tekken.json").read_text())
    content["config"] |= config
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "an entry is missing or of another type"),
        ({"config": {}}, "an entry is missing or of another type: 'vocab'"),
        (tekken(default_num_special_tokens=2), "names 5 special tokens of 2"),
        (tekken(pattern="("), "regex|pattern|parenthesis|Oniguruma"),
        (tekken() | {"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "are not 0, 1"),
        (tekken() | {"vocab": [{"rank": 5, "token_bytes": "YQ=="}]}, "token 0 .* has the rank 5"),
        (tekken() | {"vocab": []}, "256 of the 256 single bytes"),
    ],
    ids=["list", "config", "few", "regex", "ranks", "order", "empty"],
)
def test_a_bad_tekken_file_is_one_readable_error(
    tmp_path: pathlib.Path, content: Any, said: str
) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"added_tokens_decoder": []}, "is not an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "has the id 'x'"),
        ({"added_tokens_decoder": {"-1": {"content": "a"}}}, "has the id '-1'"),
        ({"added_tokens_decoder": {"99999999999": {"content": "a"}}}, "has the id 99999999999"),
        ({"added_tokens_decoder": {"1": {"content": ""}}}, "has no text"),
        ({"added_tokens_decoder": {"1": {"content": "a"}, "2": {"content": "a"}}}, "twice"),
        ({"bos_token": "<nosuch>"}, "the special token '<nosuch>' has no id"),
        ({"bos_token": 1}, "bos_token of tokenizer_config.json is 1"),
        ({"add_bos_token": "yes"}, "true or false is meant"),
        ({"tokenizer_class": 3}, "a name is meant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_one_readable_error(
    tmp_path: pathlib.Path, config: dict[str, Any], said: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(LLAMA)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert said in failure(tmp_path)


@pytest.mark.parametrize(
    "paths", [["own.OwnTokenizer", None], "own.OwnTokenizer"], ids=["list", "string"]
)
def test_code_that_splits_text_is_named_with_the_classes_that_are_known(
    paths: Any, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "own.tiktoken").write_bytes(GLM4)
    own = {"auto_map": {"AutoTokenizer": paths}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    message = failure(tmp_path)
    assert "'OwnTokenizer', which is not run" in message and "TikTokenTokenizer" in message


def test_a_broken_tokenizer_json_beside_code_of_the_repository_is_one_readable_error(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    assert "no usable tokenizer in" in failure(tmp_path)


def test_of_several_files_none_is_guessed(tmp_path: pathlib.Path) -> None:
    for name in ("a.tiktoken", "b.tiktoken"):
        (tmp_path / name).write_bytes(GLM4)
    assert "several tokenizers (a.tiktoken, b.tiktoken)" in failure(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "tokenizer_config.json"])
def test_what_is_no_regular_file_is_refused_and_not_opened(
    tmp_path: pathlib.Path, name: str, make: Callable[..., None]
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(GLM4)
    make(tmp_path / name)
    assert "is not a regular file" in failure(tmp_path)


def test_a_file_of_enormous_size_is_not_read(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "tiktoken.model", "wb") as file:
        file.truncate(2**40)
    assert "larger than 64 MiB" in failure(tmp_path)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_changed_byte_of_a_map_of_characters_never_ends_a_thread(data: st.DataObject) -> None:
    charsmap = bytearray(read_model(UNIGRAM).preparation.precompiled_charsmap)
    check_charsmap(bytes(charsmap))
    for _ in range(data.draw(st.integers(1, 4))):
        charsmap[data.draw(st.integers(0, len(charsmap) - 1))] = data.draw(st.integers(0, 255))
    try:
        check_charsmap(bytes(charsmap))
    except ValueError:
        return
    from tokenizers import normalizers

    normalizers.Precompiled(bytes(charsmap)).normalize_str(
        "AbcXYZ ﬁ\t\n" + "".join(map(chr, range(256)))
    )
