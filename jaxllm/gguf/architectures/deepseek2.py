"""DeepSeek V2, V3 and others with latent attention. Newer files hold the maps from latents to keys
and to values apart, the former turned."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import EXPERT_NAMES, LLAMA_NAMES, SHARED_NAMES, Architecture, Join
from jaxllm.gguf.changes import joined
from jaxllm.gguf.config import base_config, routed_experts, scaling
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

SIGMOID = 2  # expert_gating_func
_ATTENTION = "model.layers.{}.self_attn"
NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "blk.{}.attn_q_a": f"{_ATTENTION}.q_a_proj",
    "blk.{}.attn_q_a_norm": f"{_ATTENTION}.q_a_layernorm",
    "blk.{}.attn_q_b": f"{_ATTENTION}.q_b_proj",
    "blk.{}.attn_kv_a_mqa": f"{_ATTENTION}.kv_a_proj_with_mqa",
    "blk.{}.attn_kv_a_norm": f"{_ATTENTION}.kv_a_layernorm",
    "blk.{}.attn_kv_b": f"{_ATTENTION}.kv_b_proj",
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    **SHARED_NAMES,
}


def config(model: Model) -> dict[str, Any]:
    """The configuration of the second version, or of the third where sigmoids choose experts."""
    metadata = model.metadata
    rope = metadata.count("rope.dimension_count")
    key = metadata.count("attention.key_length_mla")
    key = key or metadata.count("attention.key_length")
    value = metadata.count("attention.value_length_mla") or metadata.count("attention.value_length")
    heads = metadata.count("attention.head_count")
    layers = metadata.count("block_count")
    predicting = metadata.count("nextn_predict_layers") or 0
    settings = base_config(
        model,
        "deepseek_v3" if metadata.count("expert_gating_func") == SIGMOID else "deepseek_v2",
        num_key_value_heads=heads,
        kv_lora_rank=metadata.count("attention.kv_lora_rank"),
        qk_rope_head_dim=rope,
        qk_nope_head_dim=key - rope if key and rope else None,
        v_head_dim=value,
        rope_scaling=_scaling(metadata),
        **routed_experts(metadata),
        num_hidden_layers=layers - predicting if layers else None,
        num_nextn_predict_layers=predicting,
    )
    settings.pop("head_dim", None)
    return settings | _groups(metadata) | {"q_lora_rank": metadata.count("attention.q_lora_rank")}


def _groups(metadata: Metadata) -> dict[str, Any]:
    """Groups of experts, which older files do not state: then those of the model of this size."""
    groups = metadata.count("expert_group_count")
    kept = metadata.count("expert_group_used_count")
    if groups is None or kept is None:
        groups, kept = {256: (8, 4), 160: (8, 3)}.get(metadata.count("expert_count") or 0, (1, 1))
    sigmoid = metadata.count("expert_gating_func") == SIGMOID
    if sigmoid:
        method = "noaux_tc"
    elif groups > 1:
        method = "group_limited_greedy"
    else:
        method = "greedy"
    return {"n_group": groups, "topk_group": kept, "topk_method": method}


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
    settings = scaling(metadata)
    growth = metadata.number("rope.scaling.yarn_log_multiplier")
    if settings is None or not growth:
        return settings
    weight = round(10 * growth, 6)  # converters write a tenth
    return {**settings, "mscale": weight, "mscale_all_dim": weight}


def _keys_values(keys: Deferred, values: Deferred) -> Deferred:
    whole = joined([keys.swapaxes(1, 2), values], 1)
    heads, rows, rank = whole.shape
    return whole.reshape((heads * rows, rank))


ARCHITECTURE = Architecture(
    config,
    NAMES,
    joins=(
        Join(
            ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
            f"{_ATTENTION}.kv_b_proj.weight",
            _keys_values,
        ),
    ),
)
