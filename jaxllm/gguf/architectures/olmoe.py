"""OLMoE. Files do not state whether queries are clipped."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "olmoe",
        num_experts=metadata.count("expert_count"),
        num_experts_per_tok=metadata.count("expert_used_count"),
    )


ARCHITECTURE = Architecture(config, {**LLAMA_NAMES, **EXPERT_NAMES})
