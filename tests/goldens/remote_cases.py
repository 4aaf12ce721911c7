"""Families that transformers does not have: what it makes instead, and how checkpoints of the
family name and arrange the same numbers. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.goldens.cases import CASES

Tensors = dict[str, torch.Tensor]


def _glm(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "glm",
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["ffn_hidden_size"],
        "num_hidden_layers": hf["num_layers"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_key_value_heads": hf["multi_query_group_num"],
        "head_dim": hf["kv_channels"],
        "vocab_size": hf["padded_vocab_size"],
        "max_position_embeddings": hf["seq_length"],
        "rms_norm_eps": hf["layernorm_epsilon"],
        "attention_bias": hf["add_qkv_bias"],
        "rope_theta": 10000.0 * hf["rope_ratio"],
        "pad_token_id": 0,
    }


def _llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in hf.items() if key not in ("auto_map", "bias")}
    return {**kept, "model_type": "llama", "attention_bias": hf["bias"]}


def _deepseek(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if key != "auto_map"} | {
        "model_type": "deepseek_v3"
    }


GLM_PARTS = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers": "transformer.encoder.layers",
    "self_attn.qkv": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
LLAMA_PARTS = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.qkv": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Family: the configuration that transformers makes, the names, groups of query, key and value heads
FAMILIES = {"chatglm": (_glm, GLM_PARTS, False), "internlm2": (_llama, LLAMA_PARTS, True)}
SAME_TENSORS = {"kimi_k2": _deepseek}  # as those of the family that transformers has


def equivalent(case: str) -> dict[str, Any] | None:
    """The configuration that transformers makes for a case, None for the case's own."""
    hf = CASES[case]
    if hf["model_type"] in SAME_TENSORS:
        return SAME_TENSORS[hf["model_type"]](hf)
    own = FAMILIES.get(hf["model_type"])
    return None if own is None else own[0](hf)


def published(case: str, tensors: Tensors) -> Tensors:
    """The tensors as checkpoints of the case's family hold them."""
    hf = CASES[case]
    if hf["model_type"] not in FAMILIES:
        return tensors
    _, names, grouped = FAMILIES[hf["model_type"]]
    groups = hf["num_key_value_heads"] if grouped else 1
    found = {}
    for name, tensor in fused(tensors, groups).items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return found


def fused(tensors: Tensors, groups: int) -> Tensors:
    """Query, key and value projections as one, group by group."""
    found = dict(tensors)
    for name in tensors:
        if "q_proj" not in name:
            continue
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        found[name.replace("q_proj", "qkv")] = torch.cat(grouped, dim=1).flatten(0, 1)
    return found
