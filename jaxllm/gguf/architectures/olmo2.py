"""OLMo 2 and 3, whose norms follow attention and feed-forward. The third has windows."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config, layer_types
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    biased = "blk.0.attn_q.bias" in model.tensors
    metadata = model.metadata
    window = metadata.count("attention.sliding_window")
    if not window:
        return base_config(model, "olmo2", attention_bias=biased)
    slides = metadata.items("attention.sliding_window_pattern", bool)
    return base_config(
        model,
        "olmo3",
        attention_bias=biased,
        sliding_window=window,
        layer_types=slides and layer_types(slides),
    )


ARCHITECTURE = Architecture(config, NAMES)
