"""What llama.cpp's converter makes of architectures with names of their own, or whose rows it puts
into another order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.gguf.conversions import Tensors, glm4moe, hunyuan_dense, llama, qwen3moe

_NEOX = [
    ("gpt_neox.embed_in", "token_embd"),
    ("gpt_neox.final_layer_norm", "output_norm"),
    ("embed_out", "output"),
    (r"gpt_neox.layers.(\d+).", r"blk.\1."),
    ("attention.query_key_value", "attn_qkv"),
    ("attention.dense", "attn_output"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
]
NAMES: dict[str, list[tuple[str, str]]] = {
    "gptneox": _NEOX,
    "chatglm": [
        ("transformer.embedding.word_embeddings", "token_embd"),
        ("transformer.encoder.final_layernorm", "output_norm"),
        ("transformer.output_layer", "output"),
        (r"transformer.encoder.layers.(\d+).self_", r"blk.\1."),
        (r"transformer.encoder.layers.(\d+).", r"blk.\1."),
        *_NEOX[4:],
    ],
    "gpt2": [
        ("transformer.wte", "token_embd"),
        ("transformer.wpe", "position_embd"),
        ("transformer.ln_f", "output_norm"),
        (r"transformer.h.(\d+).", r"blk.\1."),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ],
    "hunyuan-moe": [
        ("mlp.gate.wg", "ffn_gate_inp"),
        (r"mlp.shared_mlp.(\w+)_proj", r"ffn_\1_shexp"),
    ],
}
SPELLING = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
    "multi_query_group_num": "num_key_value_heads",
}
NORM = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight")


def renamed(tensors: Tensors, architecture: str) -> Tensors:
    """Under names of GGUF where those of the architecture are its own."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, new in NAMES.get(architecture, []):
            name = re.sub(pattern.replace(".", r"\."), new, name)
        found[name] = tensor
    return _stacked(found) if architecture == "stablelm" else found


def spelled(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the usual keys beside its own."""
    found = {**hf, **{SPELLING[key]: value for key, value in hf.items() if key in SPELLING}}
    return {"intermediate_size": 4 * found["hidden_size"], **found}


def _stacked(tensors: Tensors) -> Tensors:
    """Norms of heads as one tensor."""
    norms = {name: match.groups() for name in tensors if (match := NORM.fullmatch(name))}
    found = {name: tensor for name, tensor in tensors.items() if name not in norms}
    for layer, part in {own[:2] for own in norms.values()}:
        each = {int(own[2]): n for n, own in norms.items() if own[:2] == (layer, part)}
        stack = [tensors[each[head]] for head in range(len(each))]
        found[f"blk.{layer}.attn_{part}_norm.weight"] = np.stack(stack)
    return found


def epsilon(hf: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon")
    return {"attention.layer_norm_epsilon": next((hf[key] for key in keys if key in hf), 1e-5)}


def turning(hf: Mapping[str, Any], usual: float) -> dict[str, Any]:
    share = hf.get("rotary_pct", hf.get("partial_rotary_factor", usual))
    return {"rope.dimension_count": int(share * (hf["hidden_size"] // hf["num_attention_heads"]))}


def parallel(hf: Mapping[str, Any], usual: bool) -> dict[str, Any]:
    return {"use_parallel_residual": hf.get("use_parallel_residual", usual)}


def stablelm(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return epsilon(hf) | turning(hf, 0.25) | parallel(hf, False)


def nemotron(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = tensors[name] + np.float32(1)
    return epsilon(hf) | turning(hf, 0.5)


def olmo(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    clip = {"attention.clamp_kqv": hf["clip_qkv"]} if "clip_qkv" in hf else {}
    llama(hf, tensors)
    return {"attention.layer_norm_epsilon": 1e-5, **clip}


def olmo2(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    if "sliding_window" not in hf:
        return {}
    slides = [(layer + 1) % 4 != 0 for layer in range(hf["num_hidden_layers"])]
    own = "attention.sliding_window"
    return {own: hf["sliding_window"], f"{own}_pattern": slides}


def hunyuan_moe(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    inner = {"moe_intermediate_size": hf["intermediate_size"]}
    found = qwen3moe({**hf, **inner, "num_experts_per_tok": hf["moe_topk"]}, tensors)
    return found | hunyuan_dense(hf, tensors)


def gptneox(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in [name for name in tensors if "attn_qkv" in name]:
        rows = tensors[name]
        heads = rows.reshape(hf["num_attention_heads"], 3, -1, *rows.shape[1:])
        tensors[name] = heads.swapaxes(0, 1).reshape(rows.shape)
    base = {"rope.freq_base": float(hf.get("rotary_emb_base", 10000))}
    return epsilon(hf) | turning(hf, 0.25) | parallel(hf, True) | base


def gpt2(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    for name in tensors:
        if re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name):
            tensors[name] = tensors[name].T
    return epsilon(hf)


def chatglm(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    return {
        "attention.layer_norm_rms_epsilon": hf["layernorm_epsilon"],
        "rope.freq_base": 10000 * hf["rope_ratio"],
        **turning(hf, 0.5),
    }


def exaone(hf: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """As Llama, but for the rows of queries and keys, which keep their order."""
    own = dict(tensors)
    found = llama(hf, own)
    tensors |= {name: own[name] for name in own if name == "rope_freqs.weight"}
    return found


KINDS: dict[str, Callable[[Mapping[str, Any], Tensors], dict[str, Any]]] = {
    "internlm2": llama,
    "exaone": exaone,
    "dots1": glm4moe,
    "stablelm": stablelm,
    "nemotron": nemotron,
    "olmo": olmo,
    "olmo2": olmo2,
    "hunyuan-moe": hunyuan_moe,
    "gptneox": gptneox,
    "gpt2": gpt2,
    "chatglm": chatglm,
}
