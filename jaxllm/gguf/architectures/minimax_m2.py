"""MiniMax M2."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **llama.NAMES,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "minimax_m2",
        intermediate_size=metadata.count("expert_feed_forward_length"),
        num_local_experts=metadata.count("expert_count"),
        num_experts_per_tok=metadata.count("expert_used_count"),
        rotary_dim=metadata.count("rope.dimension_count"),
    )


ARCHITECTURE = Architecture(config, NAMES)
