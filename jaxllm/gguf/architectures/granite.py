"""Granite 3 and 4 without experts or recurrent layers: Llama with multipliers."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "granite",
        attention_multiplier=metadata.number("attention.scale"),
        embedding_multiplier=metadata.number("embedding_scale"),
        residual_multiplier=metadata.number("residual_scale"),
        logits_scaling=metadata.number("logit_scale"),
    )


ARCHITECTURE = Architecture(config, LLAMA_NAMES, llama.CHANGES)
