"""What a Q4_K_M file takes of a device's memory: counted from headers, for the sizes of published
models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import ALWAYS, SHAPES
from jaxllm import weights
from jaxllm.engine.startup.budget import shard_bytes
from jaxllm.gguf.directory import model_directory
from jaxllm.mesh import make_mesh
from jaxllm.models import make_spec, read_spec
from jaxllm.models.config.build import outline, rules
from tests.gguf.converted import KINDS, POST_ATTENTION, common, renamed
from tests.gguf.writer import Q4_K, Q5_0, Q6_K, Q8_0, Stored, write_empty

LIMIT = 1.25


class Model(NamedTuple):
    """A published model: the shape that it has but for these keys, and its file in GB."""

    shape: str
    gigabytes: float
    keys: Mapping[str, Any] = MappingProxyType({})


def sized(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "eos_token_id": 2,
        "bos_token_id": 1,
        **more,
    }


QWEN = {"tie_word_embeddings": True}
MODELS = {
    "Llama-2-7B": Model("llama-3.1-8b", 4.08, sized(4096, 11008, 32, 32, 32, 32000)),
    "Mistral-7B": Model("llama-3.1-8b", 4.37, sized(4096, 14336, 32, 32, 8, 32000)),
    "Llama-3.1-8B": Model("llama-3.1-8b", 4.91),
    "Qwen2.5-7B": Model("qwen2.5-7b", 4.68),
    "Qwen2.5-32B": Model("qwen2.5-7b", 19.84, sized(5120, 27648, 64, 40, 8, 152064)),
    "Llama-3.2-1B": Model("llama-3.2-1b", 0.80),
    "Llama-3.2-3B": Model("llama-3.2-1b", 2.01, sized(3072, 8192, 28, 24, 8, 128256, head_dim=128)),
    "Qwen2.5-1.5B": Model("qwen2.5-7b", 0.98, sized(1536, 8960, 28, 12, 2, 151936, **QWEN)),
    "Qwen2.5-3B": Model("qwen2.5-7b", 1.92, sized(2048, 11008, 36, 16, 2, 151936, **QWEN)),
    "Gemma-2-9B": Model("gemma2-9b", 5.75),
}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma2": "gemma2"}
SMALLER = {Q4_K: Q5_0, Q6_K: Q8_0}  # where blocks of 256 do not divide a row


def number(name: str, layers: int, tied: bool) -> int:
    """The type that llama.cpp gives a matrix in Q4_K_M."""
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return Q6_K
    if "attn_v." not in name and "ffn_down." not in name:
        return Q4_K
    layer, eighth = int(name.split(".")[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return Q6_K if more else Q4_K


def written(path: Path, config: dict[str, Any]) -> Path:
    """A Q4_K_M file of this configuration, without its numbers."""
    spec, architecture = make_spec(config), ARCHITECTURES[config["model_type"]]
    pieces = [p for rule in rules(spec, outline(spec, 1, np.float32)) for p in rule.pieces]
    shapes = {p.name: np.broadcast_to(np.float32(0), p.source) for p in pieces}
    tensors = {}
    for name, each in renamed(shapes, POST_ATTENTION.get(architecture, "ffn_norm")).items():
        kind = number(name, len(spec.layers), spec.tied) if each.ndim > 1 else 0
        kind = SMALLER.get(kind, kind) if each.shape[-1] % 256 else kind
        tensors[name] = Stored(kind, each.shape, b"")
    keys = common(config) | KINDS.get(architecture, lambda hf, tensors: {})(config, {})
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_empty(path, metadata, tensors)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("Llama-3.1-8B", "Llama-3.2-1B") else pytest.mark.slow
        )
        for name in MODELS
    ],
)
def test_a_q4_k_m_file_takes_little_more_than_its_size(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    path = written(tmp_path / "model.gguf", ALWAYS | SHAPES[model.shape] | model.keys)
    size = path.stat().st_size
    assert size == pytest.approx(model.gigabytes * 1e9, rel=0.01)  # what llama.cpp makes
    directory, _ = model_directory(path, str(tmp_path))
    spec = read_spec(directory)
    spec = replace(spec, formats=weights.weight_formats(directory, spec, None))
    held = weights.outline(spec, make_mesh(1), jnp.bfloat16)
    times = shard_bytes(jax.tree.leaves(held.state)) / size
    print(f"{name}: {size / 1e9:.2f} GB, {times:.3f} times that on a device")
    assert times <= LIMIT
