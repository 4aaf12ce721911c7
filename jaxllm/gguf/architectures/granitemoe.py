"""Granite with experts, whose gates and ups are one tensor in checkpoints."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture, Join
from jaxllm.gguf.architectures import granite, llama
from jaxllm.gguf.changes import joined
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

_LAYER = "model.layers.{}"
NAMES = {
    **LLAMA_NAMES,
    "blk.{}.ffn_gate_inp": f"{_LAYER}.block_sparse_moe.router.layer",
    "blk.{}.ffn_down_exps": f"{_LAYER}.block_sparse_moe.output_linear",
    "blk.{}.ffn_down_shexp": f"{_LAYER}.shared_mlp.output_linear",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration of the family, or of the one with a shared feed-forward."""
    metadata = model.metadata
    shared = metadata.count("expert_shared_feed_forward_length")
    settings = granite.config(model) | {
        "model_type": "granitemoe",
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
    }
    if shared:
        settings |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return settings


def _below(gate: Deferred, up: Deferred) -> Deferred:
    return joined([gate, up], len(gate.shape) - 2)


def _join(suffix: str, name: str) -> Join:
    parts = tuple(f"blk.{{}}.ffn_{part}_{suffix}.weight" for part in ("gate", "up"))
    return Join(parts, f"{_LAYER}.{name}.input_linear.weight", _below, by_rows=True)


ARCHITECTURE = Architecture(
    config,
    NAMES,
    llama.CHANGES,
    joins=(_join("exps", "block_sparse_moe"), _join("shexp", "shared_mlp")),
)
