"""StarCoder 2. Files do not state its window, which is as long as its context."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "blk.{}.ffn_up": "model.layers.{}.mlp.c_fc",
    "blk.{}.ffn_down": "model.layers.{}.mlp.c_proj",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(
        model,
        "starcoder2",
        norm_epsilon=model.metadata.number("attention.layer_norm_epsilon"),
        use_bias="blk.0.attn_q.bias" in model.tensors,
    )


ARCHITECTURE = Architecture(config, NAMES)
