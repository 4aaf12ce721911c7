"""Keys and values of 8 bits: what a checkpoint's configuration says of them, and under which names
it brings scales. Imports no jax."""

from __future__ import annotations

import math
from typing import Any

from jaxllm.nn.rules import Piece, Rule

# A configuration's key, which no file has: for each layer the `Tensors` to use, None for none
KV_SCALES = "KV scales"
SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)

# What a group of modules may say is quantised
SCHEMES = ("weights", "input_activations", "output_activations")

type Tensors = list[tuple[str, tuple[int, ...]]]  # name and shape: of a layer's keys, of its values


def kv_scale_names(layer: int) -> list[tuple[str, str]]:
    """Under which names a checkpoint may bring the scales of a layer's keys and values, the
    likeliest first."""
    prefix = f"model.layers.{layer}.self_attn"
    return [(f"{prefix}.{key}", f"{prefix}.{value}") for key, value in SPELLINGS]


def kv_scales_rule(layer: int, tensors: Tensors, heads: int) -> Rule:
    """The parameter `[K, 2]` of a layer's scales, for `heads` KV heads as they are stored: tensors
    of one number for all of them, or of one for each head, which several shards may hold."""
    sizes = [math.prod(shape) for _, shape in tensors]
    pieces = (
        Piece(name, shape, (size, 1), side, heads // size)
        for side, ((name, shape), size) in enumerate(zip(tensors, sizes, strict=True))
    )
    return Rule(f"layers.{layer}.attention.kv_scales", tuple(pieces))


def kv_cache_dtype(quantisation: Any) -> str | None:
    """The `--kv-cache-dtype` of a `quantization_config` that leaves the weights as they are and
    wants keys and values as 8-bit floats, or as they are, too: of compressed-tensors, or of
    modelopt, also as its own hf_quant_config.json has it. None for every other."""
    if not isinstance(quantisation, dict):
        return None
    own = quantisation.get("quantization")  # of hf_quant_config.json
    told = own if isinstance(own, dict) else quantisation
    groups, scheme = told.get("config_groups") or {}, told.get("kv_cache_scheme")
    if quantisation.get("quant_method", "modelopt") not in ("compressed-tensors", "modelopt"):
        return None
    if any(part.get("quant_algo") or _changes_weights(part) for part in (quantisation, told)):
        return None
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) and not any(map(group.get, SCHEMES)) for group in groups.values()
    ):
        return None
    if isinstance(scheme, dict):
        return "fp8_e4m3" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else None
    algorithm = told.get("kv_cache_quant_algo", "") if scheme is None else ""
    return "fp8_e4m3" if algorithm == "FP8" else "auto" if algorithm is None else None


def _changes_weights(told: dict[str, Any]) -> bool:
    """Whether weights are stored sparse, or activations are to be rotated before them."""
    sparsity = told.get("sparsity_config")
    return bool(told.get("transform_config")) or (
        isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")
    )
