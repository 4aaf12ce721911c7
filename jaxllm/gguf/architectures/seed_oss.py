"""Seed-OSS."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(
        model,
        "seed_oss",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        attention_out_bias="blk.0.attn_output.bias" in model.tensors,
    )


ARCHITECTURE = Architecture(config, NAMES)
