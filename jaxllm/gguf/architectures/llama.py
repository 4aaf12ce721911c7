"""Llama, Mistral and Mixtral. Converters put the rows of queries and keys into another order and
keep Llama 3's stretched frequencies as factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.changes import halves
from jaxllm.gguf.config import base_config, stretched
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

_MIXTURE = "model.layers.{}.block_sparse_moe"
NAMES: Mapping[str, str | None] = {
    **LLAMA_NAMES,
    "blk.{}.ffn_gate_inp": f"{_MIXTURE}.gate",
    "blk.{}.ffn_gate_exps": f"{_MIXTURE}.experts.{{}}.w1",
    "blk.{}.ffn_down_exps": f"{_MIXTURE}.experts.{{}}.w2",
    "blk.{}.ffn_up_exps": f"{_MIXTURE}.experts.{{}}.w3",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration of one of the three."""
    metadata = model.metadata
    experts = metadata.count("expert_count")
    biased = "blk.0.attn_q.bias" in model.tensors
    settings = base_config(
        model,
        "mixtral" if experts else "llama",
        attention_bias=biased,
        num_local_experts=experts or None,
        num_experts_per_tok=metadata.count("expert_used_count") or None,
    )
    if "head_dim" not in settings and metadata.count("rope.dimension_count"):
        settings["head_dim"] = metadata.count("rope.dimension_count")
    return settings | stretched(model)


def _queries(tensor: Deferred, metadata: Metadata) -> Deferred:
    return halves(tensor, metadata.count("attention.head_count") or 1)


def _keys(tensor: Deferred, metadata: Metadata) -> Deferred:
    heads = metadata.count("attention.head_count_kv") or metadata.count("attention.head_count")
    return halves(tensor, heads or 1)


CHANGES = {"blk.{}.attn_q": _queries, "blk.{}.attn_k": _keys}
ARCHITECTURE = Architecture(config, NAMES, CHANGES)
