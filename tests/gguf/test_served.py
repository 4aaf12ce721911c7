"""A GGUF file is found, checked and served like the directory that it was converted from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, weights
from jaxllm.config import ConfigError
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.models import read_spec
from jaxllm.tokenizer import Tokenizer
from tests.gguf.converted import converted
from tests.gguf.test_checkpoints import FURTHER
from tests.gguf.writer import Q8_0, Stored, plain, quantised
from tests.goldens.golden import load_golden
from tests.goldens.test_served import check, engine
from tests.tokenizer_files.test_ggml import byte_pair_keys


def demo(path: Path, **more: Any) -> Path:
    """The demo model in blocks of 8 bits, with its tokenizer and chat template."""
    tokenizer = Tokenizer.load(locate("demo"))
    keys = {f"tokenizer.ggml.{k}": v for k, v in byte_pair_keys(tokenizer, "qwen2").items()}
    template = {"tokenizer.chat_template": tokenizer.templates}

    def stored(name: str, tensor: np.ndarray) -> Stored:
        return quantised(tensor, Q8_0) if tensor.ndim > 1 else plain(tensor)

    return converted(str(locate("demo")), "qwen3", path, stored, **keys, **template, **more)


def test_a_file_and_a_directory_with_one_model_are_found(tmp_path: Path) -> None:
    path = demo(tmp_path / "demo.gguf", **{"general.sampling.temp": 0.5})
    directory = locate(str(path), download_dir=str(tmp_path / "made"))
    assert locate(str(tmp_path), download_dir=str(tmp_path / "made")) == directory
    assert read_spec(directory).eos_token_ids == (761,)
    assert json.loads((directory / "generation_config.json").read_text())["temperature"] == 0.5
    assert "27" in Tokenizer.load(directory).decode(Tokenizer.load(directory).encode("27 + 58"))
    assert (directory / "demo.gguf").resolve() == path
    path.rename(tmp_path / "other.gguf")
    demo(tmp_path / "demo.gguf")
    with pytest.raises(ConfigError, match=r"several models \(demo\.gguf, other\.gguf\)"):
        locate(str(tmp_path))


def test_an_architecture_that_does_not_run_is_refused_with_those_that_do(tmp_path: Path) -> None:
    path = converted("qwen3-gqa", "mamba", tmp_path / "m.gguf")
    message = r"'mamba' is not supported \(supported: arcee, .*deepseek2, "
    with pytest.raises(ConfigError, match=message):
        locate(str(path), download_dir=str(tmp_path))


def test_a_tensor_that_is_missing_or_strange_is_named(tmp_path: Path) -> None:
    def stored(name: str, tensor: np.ndarray) -> Stored:
        return plain(tensor[:-1] if name == "blk.1.ffn_up.weight" else tensor)

    path = converted("qwen3-gqa", "qwen3", tmp_path / "m.gguf", stored)
    directory = locate(str(path), download_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has shape"):
        weights.check(directory, weights.outline(read_spec(directory), make_mesh(1), "float32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama-llama3", "llama"),
        ("gpt-oss-fused", "gpt-oss"),
        ("deepseek-v3-groups", "deepseek2"),
        *FURTHER,
    ],
)
def test_tokens_are_those_of_the_checkpoint(name: str, architecture: str, tmp_path: Path) -> None:
    path = converted(name, architecture, tmp_path / "model.gguf")
    core = engine(path, download_dir=str(tmp_path))
    check(core, load_golden(name).continuations)


@pytest.mark.slow
def test_the_demo_model_answers_from_a_file_alone(tmp_path: Path) -> None:
    path = demo(tmp_path / "demo.gguf")
    llm = LLM(str(path), download_dir=str(tmp_path), enforce_eager=True, max_num_seqs=2)
    messages = [{"role": "user", "content": "What is 27 + 58?"}]
    (reply,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
    assert "85" in reply.outputs[0].text


def test_weights_that_went_away_or_changed_are_noticed(tmp_path: Path) -> None:
    path = converted("qwen3-gqa", "qwen3", tmp_path / "m.gguf")
    directory = locate(str(path), download_dir=str(tmp_path))
    spec = read_spec(directory)
    weights.check(directory, weights.outline(spec, make_mesh(1), "float32"))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ConfigError, match="ends at byte"):
        weights.check(directory, weights.outline(spec, make_mesh(1), "float32"))
    path.unlink()
    with pytest.raises(ConfigError, match=r"lacks m\.gguf"):
        weights.check(directory, weights.outline(spec, make_mesh(1), "float32"))
