"""Hunyuan without experts. The base of its angles is stretched in the file."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.query_layernorm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.key_layernorm",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    biased = "blk.0.attn_q.bias" in model.tensors
    return base_config(model, "hunyuan_v1_dense", attention_bias=biased)


ARCHITECTURE = Architecture(config, NAMES)
