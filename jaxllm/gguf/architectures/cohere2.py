"""Command R7B and A. Every fourth layer sees all, which files do not state."""

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
        "cohere2",
        layer_norm_eps=metadata.number("attention.layer_norm_epsilon"),
        logit_scale=metadata.number("logit_scale"),
        sliding_window=metadata.count("attention.sliding_window"),
    )


ARCHITECTURE = Architecture(config, LLAMA_NAMES)
