"""The demo model's shape, and the forward pass over packed rows through the engine's own Qwen3
definition."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from examples.demo_model.context import FusedContext
from examples.demo_model.tokenizer import VOCABULARY
from jaxllm.models import make_spec
from jaxllm.models.config.build import build
from jaxllm.nn.contexts.dense import DenseContext

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 7,
    "pad_token_id": VOCABULARY - 9,
}
TINY: dict[str, Any] = CONFIG | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def create(hf: dict[str, Any], seed: int = 0, dtype: Any = jnp.float32) -> nnx.Module:
    """The model with fresh weights."""
    return build(make_spec(hf), 1, nnx.Rngs(seed), dtype)


def forward(
    model: nnx.Module,
    token_BT: jax.Array,
    position_BT: jax.Array,
    segment_BT: jax.Array | None,
    fused: bool = False,
) -> jax.Array:
    """Hidden states `[B, T, D]` of packed rows; a token sees earlier tokens of its own segment (of
    its row when there are none)."""
    if fused:
        hidden_TD = model(
            token_BT.reshape(-1), position_BT.reshape(-1), FusedContext(len(token_BT), segment_BT)
        )
        return hidden_TD.reshape(*token_BT.shape, -1)
    if segment_BT is None:
        return jax.vmap(lambda token_T, position_T: model(token_T, position_T, DenseContext()))(
            token_BT, position_BT
        )
    return jax.vmap(
        lambda token_T, position_T, segment_T: model(token_T, position_T, DenseContext(segment_T))
    )(token_BT, position_BT, segment_BT)


def can_fuse(dtype: Any) -> bool:
    """Whether the fused kernel serves this back end and dtype."""
    return jax.default_backend() == "gpu" and dtype == jnp.bfloat16


def _parts(
    model: nnx.Module, hf: dict[str, Any]
) -> Iterator[tuple[nnx.Param, list[tuple[str, tuple[int, ...]]]]]:
    """Every parameter with the Hugging Face tensors (name, shape) that it joins, in the order of
    its rows."""
    width, inner, dim = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    query, kv = hf["num_attention_heads"] * dim, hf["num_key_value_heads"] * dim
    yield model.embed.weight, [("model.embed_tokens", (hf["vocab_size"], width))]
    yield model.norm.weight, [("model.norm", (width,))]
    for i, block in enumerate(model.layers):
        name, attention = f"model.layers.{i}", block.attention
        yield block.attention_norm.weight, [(f"{name}.input_layernorm", (width,))]
        yield block.mlp_norm.weight, [(f"{name}.post_attention_layernorm", (width,))]
        projections = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        yield (
            attention.qkv.weight,
            [(f"{name}.self_attn.{part}", (size, width)) for part, size in projections],
        )
        yield attention.out.weight, [(f"{name}.self_attn.o_proj", (width, query))]
        yield attention.q_norm.weight, [(f"{name}.self_attn.q_norm", (dim,))]
        yield attention.k_norm.weight, [(f"{name}.self_attn.k_norm", (dim,))]
        yield (
            block.mlp.gate_up.weight,
            [(f"{name}.mlp.{part}", (inner, width)) for part in ("gate_proj", "up_proj")],
        )
        yield block.mlp.down.weight, [(f"{name}.mlp.down_proj", (width, inner))]


def tensors(model: nnx.Module, hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """The model's weights under their Hugging Face names, in bfloat16."""
    named = {}
    for parameter, parts in _parts(model, hf):
        value = np.asarray(parameter[...].astype(jnp.bfloat16)).reshape(-1, *parts[0][1][1:])
        for name, shape in parts:
            named[f"{name}.weight"], value = value[: shape[0]], value[shape[0] :]
    return named


def save(model: nnx.Module, hf: dict[str, Any], path: Path) -> None:
    """Write `model.safetensors`."""
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors(model, hf).items()},
        path,
        metadata={"format": "pt"},
    )


def load(folder: Path, dtype: Any = jnp.float32) -> nnx.Module:
    """The model of a Hugging Face directory that `save` wrote, computing in `dtype`."""
    hf = json.loads((folder / "config.json").read_text())
    named, model = load_file(folder / "model.safetensors"), create(hf)
    for parameter, parts in _parts(model, hf):
        joined = np.concatenate([named[f"{name}.weight"] for name, _ in parts])
        parameter[...] = jnp.asarray(joined.reshape(parameter[...].shape), dtype)
    return model
