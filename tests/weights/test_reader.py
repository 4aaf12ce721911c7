"""Safetensors files: what is read, and what a damaged file says."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.weights.model_files import ModelFiles
from jaxllm.weights.reader import Checkpoint
from jaxllm.weights.sources.safetensors import INDEX, BadFile, open_file

HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(path: Path, header: object, data: bytes = bytes(32)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_tensors_may_be_known_by_other_names_or_not_at_all(tmp_path: Path) -> None:
    tensors = {
        name: np.arange(size, dtype=np.float32)
        for size, name in enumerate(("a.x", "b.y", "c.z"), 2)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    checkpoint.rename(lambda name: None if name == "b.y" else name[2:])
    assert set(checkpoint.entries) == {"x", "z"} and not checkpoint.problems
    np.testing.assert_array_equal(checkpoint.view("z"), np.arange(4))
    assert checkpoint.missing({"x", "y"}) == ["y"]
    checkpoint.rename(lambda name: "same")
    assert checkpoint.problems == ["x and z are both read as same"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_as_they_were_written(tmp_path: Path, dtype: type) -> None:
    tensors = {
        "x": np.arange(6).reshape(2, 3).astype(dtype),
        "scalar": np.array(2, dtype),
        "none": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    assert checkpoint.problems == []
    assert set(checkpoint.entries) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.view(name)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_a_view_copies_nothing(tmp_path: Path) -> None:
    save_file({"x": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    view = Checkpoint(ModelFiles(tmp_path)).view("x")
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_data_at_an_odd_offset_is_read(tmp_path: Path) -> None:
    header = json.dumps(HEADER).encode()
    header += b" " * (1 - len(header) % 2)
    data = (
        np.arange(6, dtype=np.float32).tobytes() + np.arange(4).astype(ml_dtypes.bfloat16).tobytes()
    )
    write(tmp_path / "model.safetensors", header, data)
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    assert checkpoint.problems == []
    assert checkpoint.view("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.view("b").astype(np.float32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: it has only 0 bytes; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS; run git lfs pull"),
        (struct.pack("<Q", 2**60) + b"{}", "it claims a header of .* bytes .*; download it again"),
        (struct.pack("<Q", 500) + b"{}", "its header needs 508 bytes, .* has 10; download"),
        (struct.pack("<Q", 2) + b"[]", "header is not a JSON object; download it again"),
        (struct.pack("<Q", 2) + b"{x", "header is not a JSON object; download it again"),
        (
            struct.pack("<Q", 8) + b'{"a": 1}',
            "a has no legal dtype, .*; download it again",
        ),
    ],
)
def test_a_file_without_a_header_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BadFile, match=message):
        open_file(tmp_path / "x.safetensors")


def changed(name: str, **fields: object) -> dict:
    return HEADER | {name: HEADER[name] | fields}


@pytest.mark.parametrize(
    ("header", "data", "messages"),
    [
        (
            HEADER,
            bytes(20),
            ["a is truncated: it ends at byte 24 of the data, the file has 20", "b is truncated"],
        ),
        (HEADER, bytes(40), ["has 8 bytes after its last tensor"]),
        (changed("b", data_offsets=[20, 28]), bytes(28), ["b overlaps the tensor before it"]),
        (changed("b", data_offsets=[28, 36]), bytes(36), ["b leaves a hole before it"]),
        (changed("a", shape=[2, 2]), bytes(32), ["a has 24 bytes, but F32 [2, 2] needs 16"]),
        (changed("b", data_offsets=[24, 23]), bytes(32), ["b has -1 bytes"]),
    ],
)
def test_every_tensor_out_of_place_is_named(
    tmp_path: Path, header: dict, data: bytes, messages: list[str]
) -> None:
    problems = open_file(write(tmp_path / "x.safetensors", header, data)).problems
    assert len(problems) == len(messages)
    assert all(message in problem for message, problem in zip(messages, problems, strict=True))


@pytest.mark.parametrize(
    "field",
    [
        {"shape": [2, -3]},
        {"shape": [2.0]},
        {"shape": "x"},
        {"data_offsets": [0]},
        {"dtype": 3},
        {"shape": [True]},
    ],
)
def test_illegal_header_values_are_refused(tmp_path: Path, field: dict) -> None:
    with pytest.raises(BadFile, match="no legal dtype"):
        open_file(write(tmp_path / "x.safetensors", changed("a", **field)))


def index(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def sharded(path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, path / "one.safetensors")
    save_file({"b": np.ones(3, np.float32)}, path / "two.safetensors")
    index(path, {"a": "one.safetensors", "b": "two.safetensors"})


def test_an_index_names_the_files(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "consolidated.safetensors")
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    assert checkpoint.problems == []
    assert checkpoint.view("a").tolist() == [1, 1, 1]


def lose_file(path: Path) -> None:
    (path / "two.safetensors").unlink()


def lose_tensor(path: Path) -> None:
    save_file({"c": np.ones(3, np.float32)}, path / "two.safetensors")


def twice(path: Path) -> None:
    save_file({name: np.ones(3, np.float32) for name in "ab"}, path / "two.safetensors")


def leave_the_directory(path: Path) -> None:
    index(path, {"a": "../one.safetensors"})


def no_map(path: Path) -> None:
    (path / INDEX).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_file, "two.safetensors: cannot be opened (No such file or directory)"),
        (lose_tensor, "two.safetensors lacks b, which the index places there"),
        (twice, "two.safetensors and one.safetensors both hold a"),
        (
            leave_the_directory,
            "names '../one.safetensors', which is not the name of a file in this directory",
        ),
        (no_map, "has no weight_map"),
    ],
)
def test_a_damaged_sharded_checkpoint_says_where(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    sharded(tmp_path)
    damage(tmp_path)
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    assert len(checkpoint.problems) == 1
    assert message in checkpoint.problems[0]
    assert checkpoint.missing({"a", "b", "z"}) == (["z"] if "two" in message else [])


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert Checkpoint(ModelFiles(tmp_path)).problems == [
        "model.safetensors: not a regular file; replace it"
    ]


def test_an_index_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / INDEX)
    assert Checkpoint(ModelFiles(tmp_path)).problems == [f"{INDEX} is not a regular file"]


def test_a_link_to_nowhere_is_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "absent")
    assert Checkpoint(ModelFiles(tmp_path)).problems == [
        "model-1.safetensors: cannot be opened (No such file or directory)"
    ]


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    assert Checkpoint(ModelFiles(tmp_path)).problems == [
        "no *.safetensors file; download the weights into this directory"
    ]


def test_a_pickle_is_named_and_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    checkpoint = Checkpoint(ModelFiles(tmp_path))
    assert checkpoint.problems == [
        "no *.safetensors file; pytorch_model.bin is a pickle, which is never read: "
        "convert it to safetensors"
    ]
