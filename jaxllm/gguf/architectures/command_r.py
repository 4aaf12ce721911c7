"""Command R."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "cohere",
        layer_norm_eps=metadata.number("attention.layer_norm_epsilon"),
        logit_scale=metadata.number("logit_scale"),
        use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors,
        attention_bias="blk.0.attn_q.bias" in model.tensors,
    )


ARCHITECTURE = Architecture(config, LLAMA_NAMES)
