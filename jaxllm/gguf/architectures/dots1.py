"""dots.llm1."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, SHARED_NAMES, Architecture
from jaxllm.gguf.config import base_config, routed_experts
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    **SHARED_NAMES,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration. No layer has a window."""
    metadata = model.metadata
    settings = base_config(
        model,
        "dots1",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        **routed_experts(metadata),
        n_group=metadata.count("expert_group_count"),
        topk_group=metadata.count("expert_group_used_count"),
    )
    return settings | {"sliding_window": None}


ARCHITECTURE = Architecture(config, NAMES)
