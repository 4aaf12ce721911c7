"""GLM-4 of 2025, with norms behind attention and feed-forward."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config, turning_share
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_mlp_layernorm",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(
        model,
        "glm4",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        partial_rotary_factor=turning_share(model.metadata),
    )


ARCHITECTURE = Architecture(config, NAMES)
