"""Qwen 1.5 and 2 with mixtures of experts, beside which one computes every token."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, Architecture
from jaxllm.gguf.changes import row
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

_SHARED = "model.layers.{}.mlp.shared_expert"
NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "blk.{}.ffn_gate_inp_shexp": f"{_SHARED}_gate",
    **{f"blk.{{}}.ffn_{part}_shexp": f"{_SHARED}.{part}_proj" for part in ("gate", "up", "down")},
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "qwen2_moe",
        num_experts=metadata.count("expert_count"),
        num_experts_per_tok=metadata.count("expert_used_count"),
        moe_intermediate_size=metadata.count("expert_feed_forward_length"),
        shared_expert_intermediate_size=metadata.count("expert_shared_feed_forward_length"),
        norm_topk_prob=False,
    )


ARCHITECTURE = Architecture(
    config, NAMES, {"blk.{}.ffn_gate_inp_shexp": lambda tensor, metadata: row(tensor)}
)
