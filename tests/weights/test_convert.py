"""Checkpoints written anew."""

from __future__ import annotations

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.weights.convert import convert
from jaxllm.weights.model_files import ModelFiles
from jaxllm.weights.reader import Checkpoint

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with tensors of two types, a tokenizer, a module's folder, and a pickle."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    save_file(
        {
            "a": rng.standard_normal((7, 5), np.float32),
            "b": rng.standard_normal(3).astype(ml_dtypes.bfloat16),
            "none": np.zeros((0, 4), np.float32),
        },
        folder / "model.safetensors",
    )
    config = {"model_type": "x", "torch_dtype": "float32", "text_config": {"dtype": "float32"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_bytes(b"pickle")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors, as the library of the format reads them."""
    return {
        name: array
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def test_a_copy_in_its_own_types_is_equal_and_brings_what_belongs_to_it(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "copy"
    written = convert(model, target, None, GIB)
    before, after = tensors(model), tensors(target)
    assert list(before) == list(after)
    for name, array in before.items():
        assert after[name].dtype == array.dtype
        np.testing.assert_array_equal(after[name], array)
    assert (written.tensors, written.files, written.before) == (3, 1, written.after)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert names == {"1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert Checkpoint(ModelFiles(target)).problems == []


def test_another_type_is_rounded_to_nearest_even_and_told_in_the_config(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    convert(model, tmp_path / "half", "bfloat16", GIB)
    half = tensors(tmp_path / "half")
    np.testing.assert_array_equal(half["a"], tensors(model)["a"].astype(ml_dtypes.bfloat16))
    assert half["b"].dtype == ml_dtypes.bfloat16
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == {
        "model_type": "x",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
    }


def test_files_are_split_at_the_size_that_is_asked_for(
    model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    written = convert(model, tmp_path / "split", None, 100)
    assert written.files == 2
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["a"] == "model-00001-of-00002.safetensors"
    assert index["metadata"]["total_size"] == 7 * 5 * 4 + 3 * 2
    found = Checkpoint(ModelFiles(tmp_path / "split"))
    assert found.problems == []
    np.testing.assert_array_equal(found.view("a"), tensors(model)["a"])
    again = convert(tmp_path / "split", tmp_path / "whole", None, GIB)
    assert again.files == 1
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("there", "is there already"),
        ("quantised", "leave out --dtype to keep them"),
        ("packed", "leave out --dtype to keep them"),
        ("range", "has numbers that F16 cannot hold; use --dtype bfloat16"),
        ("pickle", "pickles are never read"),
        ("broken", "cannot be converted: "),
        ("config", "there is no config.json"),
        ("parent", "cannot write"),
        ("running", "another conversion runs, or was killed"),
    ],
)
def test_what_cannot_be_converted_is_said_and_leaves_nothing_behind(
    fault: str, says: str, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "new"
    match fault:
        case "there":
            target.mkdir()
        case "quantised":
            (model / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
        case "packed":
            (model / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128}')
        case "range":
            save_file({"a": np.full(3, 1e6, np.float32)}, model / "model.safetensors")
        case "pickle":
            (model / "model.safetensors").unlink()
        case "broken":
            (model / "model.safetensors").write_bytes(b"\xff" * 64)
        case "config":
            (model / "config.json").unlink()
        case "running":
            (tmp_path / ".new.unfinished").mkdir()
        case "parent":
            target = tmp_path / "no" / "new"
    with pytest.raises(ConfigError, match=says):
        convert(model, target, "float16", GIB)
    left = [path.name for path in tmp_path.iterdir() if "new" in path.name]
    assert left == {"there": ["new"], "running": [".new.unfinished"]}.get(fault, [])


def test_the_verb_tells_what_it_did_and_why_it_could_not(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(model), str(tmp_path / "out"), "--dtype", "float16"]
    assert cli.main([*words, "--max-shard-size", "1k"]) == 0
    assert "3 tensors in one file" in capsys.readouterr().out
    assert cli.main(words) == 1
    assert capsys.readouterr().err.startswith("jaxllm convert: ")
