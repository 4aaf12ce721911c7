"""gpt-oss, whose gates and ups alternate in checkpoints."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture, Join
from jaxllm.gguf.changes import alternating
from jaxllm.gguf.config import base_config, scaling
from jaxllm.gguf.model import Model

_MLP = "model.layers.{}.mlp"
NAMES = {
    **LLAMA_NAMES,
    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate_inp": f"{_MLP}.router",
    "blk.{}.ffn_down_exps.weight": f"{_MLP}.experts.down_proj",
    "blk.{}.ffn_down_exps.bias": f"{_MLP}.experts.down_proj_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration. As in the published one, the edges of YaRN's ramp are not rounded. A file
    without scaling has none, where a config.json would have the published one."""
    metadata = model.metadata
    stretched = scaling(model.metadata)
    return base_config(
        model,
        "gpt_oss",
        intermediate_size=metadata.count("expert_feed_forward_length"),
        num_local_experts=metadata.count("expert_count"),
        num_experts_per_tok=metadata.count("expert_used_count"),
        sliding_window=metadata.count("attention.sliding_window"),
        rope_scaling={**stretched, "truncate": False} if stretched else {"rope_type": "default"},
    )


ARCHITECTURE = Architecture(
    config,
    NAMES,
    joins=(
        Join(
            ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"),
            f"{_MLP}.experts.gate_up_proj",
            alternating,
            by_rows=True,
        ),
        Join(
            ("blk.{}.ffn_gate_exps.bias", "blk.{}.ffn_up_exps.bias"),
            f"{_MLP}.experts.gate_up_proj_bias",
            alternating,
        ),
    ),
    turned=("experts.gate_up_proj", "experts.down_proj"),
)
