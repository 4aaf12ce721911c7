"""GLM-4 of 2024 and ChatGLM 2 and 3."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture, Join
from jaxllm.gguf.changes import joined
from jaxllm.gguf.config import base_config, turning_share
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

_LAYER = "transformer.encoder.layers.{}"
NAMES = {
    "token_embd": "transformer.embedding.word_embeddings",
    "output_norm": "transformer.encoder.final_layernorm",
    "output": "transformer.output_layer",
    "rope_freqs": None,
    "blk.{}.attn_norm": f"{_LAYER}.input_layernorm",
    "blk.{}.attn_qkv": f"{_LAYER}.self_attention.query_key_value",
    "blk.{}.attn_output": f"{_LAYER}.self_attention.dense",
    "blk.{}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
    "blk.{}.ffn_up": f"{_LAYER}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": f"{_LAYER}.mlp.dense_4h_to_h",
}
THETA = 10000  # of which the base of its angles is a multiple


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    width = metadata.count("embedding_length")
    heads = metadata.count("attention.head_count")
    biases = ("blk.0.attn_qkv.bias", "blk.0.attn_q.bias")
    settings = base_config(
        model,
        "chatglm",
        multi_query_attention=True,
        multi_query_group_num=metadata.count("attention.head_count_kv"),
        add_qkv_bias=any(name in model.tensors for name in biases),
        rope_ratio=(metadata.number("rope.freq_base") or THETA) / THETA,
        partial_rotary_factor=turning_share(metadata),
    )
    if width and heads:
        settings.setdefault("head_dim", width // heads)
    return settings


def _below(*parts: Deferred) -> Deferred:
    return joined(parts, 0)


def _join(leaf: str) -> Join:
    """Of files that were converted from transformers' form."""
    parts = tuple(f"blk.{{}}.attn_{part}.{leaf}" for part in "qkv")
    return Join(parts, f"{_LAYER}.self_attention.query_key_value.{leaf}", _below, by_rows=True)


ARCHITECTURE = Architecture(config, NAMES, joins=(_join("weight"), _join("bias")))
