"""GLM-4.5 to 4.7. Layers that predict further tokens follow the others."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, SHARED_NAMES, Architecture
from jaxllm.gguf.config import base_config, routed_experts, turning_share
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    **SHARED_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    layers = metadata.count("block_count")
    predicting = metadata.count("nextn_predict_layers") or 0
    return base_config(
        model,
        "glm4_moe",
        num_hidden_layers=layers - predicting if layers else None,
        num_nextn_predict_layers=predicting,
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors,
        partial_rotary_factor=turning_share(metadata),
        **routed_experts(metadata),
        n_group=metadata.count("expert_group_count"),
        topk_group=metadata.count("expert_group_used_count"),
    )


ARCHITECTURE = Architecture(config, NAMES)
