"""What llama.cpp's converter changes in tensors of an architecture, and the keys that it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

type Tensors = dict[str, np.ndarray]


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head side by side."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def llama(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if ".attn_q." in name:
            tensors[name] = pairs(tensors[name], hf["num_attention_heads"])
        if ".attn_k." in name:
            tensors[name] = pairs(tensors[name], hf.get("num_key_value_heads"))
    scaling = hf.get("rope_scaling") or {}
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(scaling, hf["rope_theta"], dim)
    experts = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    found = {key: hf[own] for key, own in experts.items() if own in hf}
    return {"rope.dimension_count": dim, **found}


def llama3_factors(scaling: Mapping[str, Any], theta: float, dim: int) -> np.ndarray:
    """What each frequency is divided by, by the formula of Llama 3.1's release."""
    found = []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def qwen3moe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {
        "expert_count": hf["num_experts"],
        "expert_used_count": hf["num_experts_per_tok"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
    }


def gemma(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    gemma1(hf, tensors)
    caps = {
        f"{each}_logit_softcapping": hf.get(f"{each}_logit_softcapping")
        for each in ("attn", "final")
    }
    pattern = "attention.sliding_window_pattern"
    return {
        "attention.sliding_window": hf["sliding_window"],
        **{key: float(value) for key, value in caps.items() if value},
        **({pattern: hf["sliding_window_pattern"]} if "sliding_window_pattern" in hf else {}),
    }


def phi3(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    scaling = hf["rope_scaling"]
    for each in ("short", "long"):
        factors = np.array(scaling[f"{each}_factor"], np.float32)
        tensors[f"rope_factors_{each}.weight"] = factors
    dim = hf["hidden_size"] // hf["num_attention_heads"]
    original = hf["original_max_position_embeddings"]
    return {
        "rope.dimension_count": dim,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(scaling["attention_factor"]),
    }


def gpt_oss(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in [name for name in tensors if ".mlp.experts." in name]:
        layer, _, part = name.partition(".mlp.experts.")
        tensor = tensors.pop(name)
        leaf = "bias" if part.endswith("_bias") else "weight"
        rows = tensor if leaf == "bias" else tensor.swapaxes(1, 2)
        if part.startswith("down"):
            tensors[f"{layer}.ffn_down_exps.{leaf}"] = rows
        else:
            tensors[f"{layer}.ffn_gate_exps.{leaf}"] = rows[:, ::2]
            tensors[f"{layer}.ffn_up_exps.{leaf}"] = rows[:, 1::2]
    return {
        "expert_count": hf["num_local_experts"],
        "expert_used_count": hf["num_experts_per_tok"],
        "expert_feed_forward_length": hf["intermediate_size"],
        "attention.sliding_window": hf["sliding_window"],
    }


def deepseek2(hf: Mapping[str, Any], tensors: Tensors, apart: bool = True) -> dict[str, Any]:
    plain_dim, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    for name in [name for name in tensors if ".attn_kv_b." in name and apart]:
        heads = tensors.pop(name).reshape(hf["num_attention_heads"], plain_dim + value, -1)
        tensors[name.replace("kv_b", "k_b")] = heads[:, :plain_dim].swapaxes(1, 2)
        tensors[name.replace("kv_b", "v_b")] = heads[:, plain_dim:]
    sigmoid, scaling = hf["model_type"] == "deepseek_v3", hf.get("rope_scaling") or {}
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": hf["kv_lora_rank"] + rope,
        "attention.value_length": hf["kv_lora_rank"],
        "attention.key_length_mla": plain_dim + rope,
        "attention.value_length_mla": value,
        "attention.kv_lora_rank": hf["kv_lora_rank"],
        "attention.q_lora_rank": hf.get("q_lora_rank"),
        "rope.dimension_count": rope,
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_feed_forward_length": hf["moe_intermediate_size"],
        "expert_count": hf["n_routed_experts"],
        "expert_used_count": hf["num_experts_per_tok"],
        "expert_shared_count": hf.get("n_shared_experts"),
        "expert_weights_scale": float(hf["routed_scaling_factor"]),
        "expert_weights_norm": bool(hf.get("norm_topk_prob", sigmoid)),
        "expert_gating_func": 2 if sigmoid else 1,
        "expert_group_count": hf.get("n_group"),
        "expert_group_used_count": hf.get("topk_group"),
    }
    if scaling.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return {key: value for key, value in found.items() if value is not None}


def granite(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    scales = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    found = {key: float(hf[own]) for key, own in scales.items()}
    return {k: v for k, v in (llama(hf, tensors) | found).items() if v is not None}


def qwen2moe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensors[name] = tensors[name].reshape(-1)
    return qwen3moe(hf, tensors)


def gemma1(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = tensors[name] + np.float32(1)
    return {}


def turning(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return {"rope.dimension_count": int(dim * hf.get("partial_rotary_factor", 0.5))}


def glm4moe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    names = {
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "nextn_predict_layers": "num_nextn_predict_layers",
    }
    return turning(hf, tensors) | {key: hf[own] for key, own in names.items() if own in hf}


def ernie_moe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if name.endswith("exp_probs_b.bias"):
            tensors[name] = tensors[name].reshape(-1)
    names = {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_shared_count": "moe_num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "moe_layer_start_index",
    }
    return {key: hf[own] for key, own in names.items()}


def hunyuan_dense(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    dim, alpha = hf["head_dim"], hf["rope_scaling"]["alpha"]
    return {"rope.freq_base": hf.get("rope_theta", 10000.0) * alpha ** (dim / (dim - 2))}


def minimax_m2(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {
        "expert_count": hf["num_local_experts"],
        "expert_used_count": hf["num_experts_per_tok"],
        "expert_feed_forward_length": hf["intermediate_size"],
        "rope.dimension_count": hf["rotary_dim"],
    }


def cohere(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    window = {"attention.sliding_window": hf["sliding_window"]} if "sliding_window" in hf else {}
    return {"attention.layer_norm_epsilon": 1e-5, "logit_scale": hf["logit_scale"], **window}


def exaone4(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    every = hf["sliding_window_pattern"]
    pattern = [(layer + 1) % every != 0 for layer in range(hf["num_hidden_layers"])]
    own = "attention.sliding_window"
    return {own: hf["sliding_window"], f"{own}_pattern": pattern}


def starcoder2(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": hf["norm_epsilon"]}


def granitemoe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in [name for name in tensors if "input_linear" in name]:
        gate, up = np.split(tensors.pop(name), 2, axis=-2)
        owner, suffix = name.partition(".input_linear")[0].rpartition(".")[::2]
        kind = "shexp" if suffix == "shared_mlp" else "exps"
        tensors[f"{owner}.ffn_gate_{kind}.weight"] = gate
        tensors[f"{owner}.ffn_up_{kind}.weight"] = up
    shared = hf.get("shared_intermediate_size")
    return granite(hf, tensors) | ({"expert_shared_feed_forward_length": shared} if shared else {})


def mistral3(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    found, scaling = llama(hf, tensors), hf.get("rope_parameters") or {}
    if "llama_4_scaling_beta" in scaling:
        found["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = scaling["mscale_all_dim"]
    return found


KINDS: dict[str, Callable[[Mapping[str, Any], Tensors], dict[str, Any]]] = {
    "llama": llama,
    "smollm3": llama,
    "granite": granite,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "gemma2": gemma,
    "gemma3": gemma,
    "phi3": phi3,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "gemma": gemma1,
    "olmoe": lambda hf, tensors: qwen3moe({"moe_intermediate_size": 8, **hf}, tensors),
    "glm4": turning,
    "glm4moe": glm4moe,
    "ernie4_5-moe": ernie_moe,
    "hunyuan-dense": hunyuan_dense,
    "minimax-m2": minimax_m2,
    "command-r": cohere,
    "cohere2": cohere,
    "exaone4": exaone4,
    "starcoder2": starcoder2,
    "granitemoe": granitemoe,
    "arcee": lambda hf, tensors: llama(hf, tensors),
    "mistral3": mistral3,
}
