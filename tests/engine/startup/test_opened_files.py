"""A start opens each file of weights once, and leaves none open."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.started import check_fit
from jaxllm.models.config import build
from jaxllm.weights.convert import convert
from tests.engine.few_shapes import few_shapes
from tests.gguf.converted import converted
from tests.goldens.golden import load_golden

LLAMA = load_golden("llama-gqa").directory
LIMITS: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16}
WEIGHTS = (".safetensors", ".gguf", ".index.json")
_watched: list[str] = []
_hooked: list[bool] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and str(arguments[0]).endswith(WEIGHTS):
        _watched.append(os.path.realpath(str(arguments[0])))


@contextmanager
def opens() -> Iterator[Counter[str]]:
    """Counts the opens of weights' files by their real paths, whoever opens them."""
    if not _hooked:  # one hook serves all tests, since none can be taken away
        sys.addaudithook(_hear)
        _hooked.append(True)
    counts = Counter[str]()
    _watched.append("")
    try:
        yield counts
    finally:
        counts.update(path for path in _watched if path)
        _watched.clear()


def open_weights() -> list[str]:
    """Weights' files that this process has open or mapped."""
    gc.collect()
    descriptors = Path("/proc/self/fd").iterdir()
    paths = [os.path.realpath(link) for link in descriptors if link.exists()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths += [line.rpartition(" ")[2] for line in maps]
    return sorted({path for path in paths if path.endswith(WEIGHTS)})


def one_file(path: Path) -> str:
    return str(shutil.copytree(LLAMA, path / "model"))


def several_files(path: Path) -> str:
    convert(LLAMA, path / "model", None, 20_000)
    return str(path / "model")


def gguf(path: Path) -> str:
    return str(converted("llama-gqa", "llama", path / "model.gguf"))


CONTAINERS = {"safetensors": one_file, "safetensors with an index": several_files, "gguf": gguf}


def start(model: str, path: Path, **wishes: Any) -> Engine:
    usual: dict[str, Any] = {
        **LIMITS,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "download_dir": str(path / "made"),
    }
    config = EngineConfig(model=model, **usual | wishes)
    with few_shapes():
        engine = load_engine(config, Report())
    assert isinstance(engine, Engine)
    return engine


@pytest.mark.parametrize("write", CONTAINERS.values(), ids=list(CONTAINERS))
def test_a_start_opens_each_file_once_and_closes_all(
    write: Callable[[Path], str], tmp_path: Path
) -> None:
    model = write(tmp_path)
    with opens() as counts:
        engine = start(model, tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.name.endswith(WEIGHTS)]
    assert counts == dict.fromkeys({os.path.realpath(path) for path in written}, 1)
    assert open_weights() == [], "files are closed while the engine runs"
    assert engine.stats().sleep_level == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_weights_that_are_kept_and_stages_open_no_more(stages: int, tmp_path: Path) -> None:
    model = one_file(tmp_path)
    kept = {"weight_cache_dir": str(tmp_path / "cache"), "quantization": "int8"}
    wishes: dict[str, Any] = {**kept, "pipeline_parallel_size": stages}
    start(model, tmp_path, **wishes)
    with opens() as counts:
        start(model, tmp_path, **wishes)
    entries = list((tmp_path / "cache").glob("*/*.safetensors"))
    assert len(entries) == stages
    assert counts == dict.fromkeys([f"{model}/model.safetensors", *map(str, entries)], 1)
    assert open_weights() == []


def test_other_weights_are_opened_once(tmp_path: Path) -> None:
    engine = start(one_file(tmp_path), tmp_path)
    for level in (0, 2):
        if level:
            engine.sleeper.sleep(level)
        with opens() as counts:
            engine.sleeper.update_weights(LLAMA)
        assert list(counts.values()) == [1]
    assert open_weights() == []


def test_a_start_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    model = one_file(tmp_path)
    with pytest.raises(ConfigError, match="num_hidden_layers is 3"):
        start(model, tmp_path, hf_overrides={"num_hidden_layers": 3})
    with pytest.raises(ConfigError, match="must be at least"):
        start(model, tmp_path, max_num_seqs=64, max_num_batched_tokens=16)
    with pytest.raises(ConfigError, match=r"--compilation-cache-dir .* cannot be used") as error:
        start(model, tmp_path, compilation_cache_dir=f"{model}/config.json/cache")
    assert open_weights() == [], "also while somebody has the error, and with it the frames"
    del error


def test_a_model_is_outlined_once_whatever_a_start_asks_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizing looks at few layers, and what is packed at none, which costs no more by the layer."""
    layers = list[int]()
    real = build.outline

    def outline(spec: Any, shards: int, dtype: Any) -> Any:
        layers.append(len(spec.layers))
        return real(spec, shards, dtype)

    monkeypatch.setattr(build, "outline", outline)
    check_fit(EngineConfig(model=one_file(tmp_path), **LIMITS))
    assert layers == [1, 2], "of one layer against absurd sizes, and of the model"
