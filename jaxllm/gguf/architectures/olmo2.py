"""OLMo 2, whose norms follow attention and feed-forward. One with windows is OLMo 3."""

from __future__ import annotations

from typing import Any

from jaxllm.config import ConfigError
from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration. Raises ConfigError for OLMo 3."""
    if model.metadata.get("attention.sliding_window"):
        raise ConfigError(
            "the GGUF file holds OLMo 3, which is read from safetensors alone; use those"
        )
    biased = "blk.0.attn_q.bias" in model.tensors
    return base_config(model, "olmo2", attention_bias=biased)


ARCHITECTURE = Architecture(config, NAMES)
