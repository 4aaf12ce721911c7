"""Golden checkpoints as GGUF files: what llama.cpp's converter makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxllm.models.config.read import family
from tests.gguf import conversions, further_conversions
from tests.gguf.conversions import Tensors
from tests.gguf.writer import Stored, plain, write
from tests.goldens.golden import HERE

NAMES = [
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.(\w+)_a_layernorm", r"attn_\1_a_norm"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"self_attn\.(\w+)_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.([qk])\w+_layernorm", r"attn_\1_norm"),
    (r"post_self_attn_layernorm", "post_attention_norm"),
    (r"post_mlp_layernorm", "post_ffw_norm"),
    (r"mlp\.c_fc", "ffn_up"),
    (r"mlp\.c_proj", "ffn_down"),
    (r"block_sparse_moe\.router\.layer", "ffn_gate_inp"),
    (r"block_sparse_moe\.output_linear", "ffn_down_exps"),
    (r"shared_mlp\.output_linear", "ffn_down_shexp"),
    (r"(mlp\.moe_statics|block_sparse_moe)\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"input_layernorm", "attn_norm"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias)", r"ffn_gate_inp.\3"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"mlp\.shared_experts?\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", r"ffn_gate_inp_shexp"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(\w+)_proj\.", r"ffn_\1."),
]
EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def renamed(tensors: Tensors, post_attention: str) -> Tensors:
    """Under the names of GGUF, with the experts of a layer as one tensor."""
    found: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            layer, expert, part = match.groups()
            part = PARTS.get(part, part.removesuffix("_proj"))
            stack = f"blk.{layer.split('.')[-1]}.ffn_{part}_exps.weight"
            stacks.setdefault(stack, {})[int(expert)] = tensor
            continue
        for pattern, new in [*NAMES, ("post_attention_layernorm", post_attention)]:
            name = re.sub(pattern, new, name)
        found[name] = tensor
    stacked = {n: np.stack([each[i] for i in range(len(each))]) for n, each in stacks.items()}
    return found | stacked


def common(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that all architectures have."""
    found = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf.get("num_key_value_heads", hf["num_attention_heads"]),
    }
    bases = {
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "rope.freq_base_swa": "rope_local_base_freq",
    }
    found |= {key: float(hf[own]) for key, own in bases.items() if own in hf}
    if "head_dim" in hf:
        found |= {f"attention.{each}_length": hf["head_dim"] for each in ("key", "value")}
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    found |= {"rope.freq_base": float(scaling["rope_theta"])} if "rope_theta" in scaling else {}
    if scaling.get("rope_type", scaling.get("type")) in ("linear", "yarn"):
        found["rope.scaling.type"] = scaling.get("rope_type", scaling.get("type"))
        found["rope.scaling.factor"] = float(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            original = scaling["original_max_position_embeddings"]
            found["rope.scaling.original_context_length"] = original
        betas = (key for key in ("beta_fast", "beta_slow") if key in scaling)
        found |= {f"rope.scaling.yarn_{key}": float(scaling[key]) for key in betas}
    return found


WITH_DEFAULTS = ("rms_norm_eps", "rope_theta", "num_experts_per_tok")
KINDS = conversions.KINDS | further_conversions.KINDS
POST_ATTENTION = dict.fromkeys(
    ("gemma2", "gemma3", "gpt-oss", "olmo2", "seed_oss", "glm4moe", "exaone4"),
    "post_attention_norm",
)


def converted(
    name: str,
    architecture: str,
    path: Path,
    stored: Callable[[str, np.ndarray], Stored] = lambda name, tensor: plain(tensor),
    **more: Any,
) -> Path:
    """A golden checkpoint as a GGUF file, whose tensors are `stored(name, tensor)`."""
    hf = json.loads((HERE / name / "config.json").read_text())
    return written(
        hf, load_file(HERE / name / "model.safetensors"), architecture, path, stored, **more
    )


def written(
    hf: Mapping[str, Any],
    checkpoint: Tensors,
    architecture: str,
    path: Path,
    stored: Callable[[str, np.ndarray], Stored],
    **more: Any,
) -> Path:
    """A checkpoint as a GGUF file, whose tensors are `stored(name, tensor)`."""
    kind = family(hf["model_type"])  # converters see its defaults, too
    defaults = {"rope_theta": getattr(kind, "THETA", None)} | dict(kind.DEFAULTS)
    hf = {key: defaults[key] for key in WITH_DEFAULTS if defaults.get(key)} | dict(hf)
    further = further_conversions.renamed(checkpoint, architecture)
    tensors = renamed(further, POST_ATTENTION.get(architecture, "ffn_norm"))
    hf = further_conversions.spelled(hf)
    own = common(hf) | KINDS.get(architecture, lambda hf, tensors: {})(hf, tensors)
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.eos_token_id": hf["eos_token_id"],
        **more,
    }
    return write(
        path, metadata, {n: stored(n, np.ascontiguousarray(t)) for n, t in tensors.items()}
    )
