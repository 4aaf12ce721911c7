"""Qwen 3 with mixtures of experts, whose weights always sum to one."""

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
        "qwen3_moe",
        num_experts=metadata.count("expert_count"),
        num_experts_per_tok=metadata.count("expert_used_count"),
        moe_intermediate_size=metadata.count("expert_feed_forward_length"),
        norm_topk_prob=True,
    )


ARCHITECTURE = Architecture(config, {**LLAMA_NAMES, **EXPERT_NAMES})
