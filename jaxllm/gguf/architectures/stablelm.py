"""StableLM. Norms of heads are one tensor here."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config, turning_share
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_layernorm.norms.{}",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_layernorm.norms.{}",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "stablelm",
        layer_norm_eps=metadata.number("attention.layer_norm_epsilon"),
        partial_rotary_factor=turning_share(metadata),
        use_parallel_residual=metadata.flag("use_parallel_residual"),
        use_qkv_bias="blk.0.attn_q.bias" in model.tensors,
        qk_layernorm="blk.0.attn_q_norm.weight" in model.tensors,
    )


ARCHITECTURE = Architecture(config, NAMES)
