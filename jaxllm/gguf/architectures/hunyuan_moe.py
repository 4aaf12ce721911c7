"""Hunyuan-A13B. The base of its angles is stretched in the file."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, Architecture
from jaxllm.gguf.architectures import hunyuan_dense
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

_MLP = "model.layers.{}.mlp"
NAMES = {
    **hunyuan_dense.NAMES,
    **EXPERT_NAMES,
    "blk.{}.ffn_gate_inp": f"{_MLP}.gate.wg",
    **{f"blk.{{}}.ffn_{p}_shexp": f"{_MLP}.shared_mlp.{p}_proj" for p in ("gate", "up", "down")},
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "hunyuan_v1_moe",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        num_experts=metadata.count("expert_count"),
        moe_topk=metadata.count("expert_used_count"),
    )


ARCHITECTURE = Architecture(config, NAMES)
