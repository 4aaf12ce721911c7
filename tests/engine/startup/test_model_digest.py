"""Engines share pages where their models' files hold the same, wherever they lie."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.startup.model_digest import HEAD, model_digest
from tests.server.fake import RESOLVED


def digest(model: pathlib.Path, **wishes: object) -> str:
    return model_digest(EngineConfig(**wishes), replace(RESOLVED, model_dir=str(model)))  # type: ignore[arg-type]


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 2 * HEAD, np.uint8)


def write(folder: pathlib.Path, data: np.ndarray) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data.tobytes())
    return folder


def test_copies_are_the_same_model_and_others_are_not(tmp_path, data):
    first = digest(write(tmp_path / "a", data))
    assert digest(write(tmp_path / "b", data)) == first
    assert digest(write(tmp_path / "c", data ^ 1)) != first
    assert digest(write(tmp_path / "d", np.append(data, np.uint8(0)))) != first
    (tmp_path / "b" / "config.json").write_text('{"rope_theta": 5}')
    assert digest(tmp_path / "b") != first


def test_options_that_change_what_is_computed_count(tmp_path, data):
    model = write(tmp_path / "a", data)
    options = [
        {},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 5}},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
    ]
    assert len({digest(model, **wishes) for wishes in options}) == len(options)
    assert digest(model, seed=1) == digest(model), "weights that are read do not depend on it"


def test_a_single_file_is_a_model(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data.tobytes())
    assert digest(path)
