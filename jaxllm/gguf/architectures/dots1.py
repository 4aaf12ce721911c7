"""dots.llm1."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, SHARED_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    **SHARED_NAMES,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration. No layer has a window."""
    own = model.metadata
    found = base_config(
        model,
        "dots1",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        n_routed_experts=own.count("expert_count"),
        num_experts_per_tok=own.count("expert_used_count"),
        n_shared_experts=own.count("expert_shared_count"),
        moe_intermediate_size=own.count("expert_feed_forward_length"),
        first_k_dense_replace=own.count("leading_dense_block_count"),
        routed_scaling_factor=own.number("expert_weights_scale"),
        norm_topk_prob=own.flag("expert_weights_norm"),
        n_group=own.count("expert_group_count"),
        topk_group=own.count("expert_group_used_count"),
    )
    return found | {"sliding_window": None}


ARCHITECTURE = Architecture(config, NAMES)
