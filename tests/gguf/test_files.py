"""Files that are cut off, damaged or absurd: one error that says what and what to do."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import ConfigError
from jaxllm.gguf.file import open_file
from jaxllm.gguf.model import open_model
from tests.gguf.writer import Stored, header, padded, plain, text, write

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 500000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "é", "世"],
    "tokenizer.ggml.scores": [0.0, -1.5, -2.0],
    "tokenizer.ggml.add_bos_token": True,
}
TENSORS = {
    "a": plain(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "b": plain(np.arange(6, dtype=np.float32), 1),
}
EMPTY = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        open_file(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_keys_and_tensors_are_read(tmp_path: Path) -> None:
    file = open_file(write(tmp_path / "m.gguf", METADATA, TENSORS))
    assert file.metadata == METADATA
    assert {name: each.shape for name, each in file.tensors.items()} == {"a": (3, 4), "b": (6,)}
    np.testing.assert_array_equal(file.tensors["a"].deferred()[1:3, 0:2], [[4, 5], [8, 9]])
    assert np.asarray(file.tensors["b"].deferred()).tolist() == [0, 1, 2, 3, 4, 5]


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", METADATA, TENSORS).read_bytes()
    used = len(header(METADATA, TENSORS)) + padded(48) + 12  # the last tensor is not padded
    for length in range(0, used, 7):
        refused(tmp_path / "cut.gguf", whole[:length])


@given(at=st.integers(0, 400), byte=st.integers(0, 255))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_changed_byte_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    data = bytearray(write(path, METADATA, TENSORS).read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data)
    try:
        open_file(path)
    except ConfigError:
        pass


def key(name: str, number: int, value: bytes) -> bytes:
    """A file with one key."""
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text(name) + struct.pack("<I", number) + value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "its version is 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "claims 1152921504606846976 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "claims 1152921504606846976 keys"),
        (key("k", 8, struct.pack("<Q", 2**40)) + bytes(20), "claims 1099511627776 bytes of a text"),
        (key("k", 9, struct.pack("<IQ", 8, 2**50)), "texts of k"),
        (key("k", 9, struct.pack("<IQ", 6, 2**62)), "numbers of k"),
        (key("k", 9, struct.pack("<IQ", 9, 1)) + bytes(20), "a list of the type 9"),
        (key("k", 77, bytes(20)), "unknown type 77"),
        (key("k", 8, struct.pack("<Q", 2) + b"\xff\xff") + bytes(20), "not UTF-8"),
        (key("general.alignment", 4, struct.pack("<I", 7)), "general.alignment is 7"),
    ],
)
def test_what_is_no_header_is_named(data: bytes, said: str, tmp_path: Path) -> None:
    assert said in refused(tmp_path / "m.gguf", data)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (Stored(12, (2, 250), bytes(500)), r"blk.1.ffn_up.weight has rows of 250 numbers, which"),
        (Stored(16, (2, 256), bytes(500)), "has the type IQ2_XXS, which is not read"),
        (Stored(99, (2, 256), bytes(500)), "has the type 99"),
        (Stored(0, (2**40, 2**40), bytes(8)), "has the absurd shape"),
        (Stored(0, (2, 0), b""), "has the absurd shape"),
        (Stored(0, (1, 1, 1, 1, 1), bytes(4)), "has 5 axes"),
        (Stored(0, (100, 100), bytes(8)), "ends at byte"),
    ],
)
def test_a_tensor_that_cannot_be_is_named_with_a_remedy(
    tensor: Stored, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", METADATA, {"blk.1.ffn_up.weight": tensor})
    message = refused(path, path.read_bytes())
    assert said in message
    assert ":" in message or ";" in message


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_a_name_that_does_not_fit_a_line_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", METADATA, {name: TENSORS["a"]})
    assert f"a tensor has the name {name!r}" in refused(path, path.read_bytes())


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", METADATA, TENSORS)
    data = path.read_bytes()
    moved = data.replace(struct.pack("<IQ", 1, padded(48)), struct.pack("<IQ", 1, 32))
    assert "b begins in the tensor a" in refused(path, moved)


def parts(folder: Path, *numbers: tuple[int, int]) -> Path:
    """Two files of one model, each with its own number and count."""
    halves = [dict([item]) for item in TENSORS.items()]
    paths = [folder / f"m-{at:05}-of-00002.gguf" for at in (1, 2)]
    for path, tensors, (number, count) in zip(paths, halves, numbers, strict=True):
        split = {"split.no": number, "split.count": count, "split.tensors.count": 2}
        write(path, {**(METADATA if number == 0 else {}), **split}, tensors)
    return paths[0]


def test_the_files_of_a_split_model_are_one(tmp_path: Path) -> None:
    first = parts(tmp_path, (0, 2), (1, 2))
    for path in (first, first.with_name("m-00002-of-00002.gguf")):
        model = open_model(path)
        assert sorted(model.tensors) == ["a", "b"]
        assert model.metadata.architecture == "llama"


def test_a_split_model_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    first = parts(tmp_path, (0, 2), (0, 2))
    with pytest.raises(ConfigError, match="is file 0 of 2 by its own keys, and 1 of 2"):
        open_model(first)
    first.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match=r"lacks m-00002-of-00002\.gguf"):
        open_model(first)


def test_lists_of_texts_are_cut_off_and_damaged_like_all_else(tmp_path: Path) -> None:
    two = struct.pack("<IQ", 8, 2)
    short = key("k", 9, two + text("ab") + struct.pack("<Q", 50) + b"c")
    assert "cut off" in refused(tmp_path / "short.gguf", short)
    assert "not UTF-8" in refused(
        tmp_path / "bad.gguf", key("k", 9, two + text("ab") + struct.pack("<Q", 1) + b"\xff")
    )
