"""ERNIE 4.5 with experts."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, SHARED_NAMES, Architecture
from jaxllm.gguf.changes import row
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    **SHARED_NAMES,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.moe_statics.e_score_correction_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "ernie4_5_moe",
        use_bias="blk.0.attn_q.bias" in model.tensors,
        moe_num_experts=metadata.count("expert_count"),
        moe_k=metadata.count("expert_used_count"),
        moe_intermediate_size=metadata.count("expert_feed_forward_length"),
        moe_num_shared_experts=metadata.count("expert_shared_count"),
        moe_layer_start_index=metadata.count("leading_dense_block_count"),
        moe_layer_interval=metadata.count("interleave_moe_layer_step"),
    )


ARCHITECTURE = Architecture(
    config, NAMES, {"blk.{}.exp_probs_b": lambda tensor, metadata: row(tensor)}
)
