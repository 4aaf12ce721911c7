"""8-bit keys and values: what a configuration wants, and the names of a checkpoint's scales.
Imports no jax."""

from __future__ import annotations

import math
from typing import Any

from jaxllm.cache.layer import ScaleTensors
from jaxllm.nn.rules import Piece, Rule

SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)

# What a group of modules may quantise, in compressed-tensors' terms
SCHEMES = ("weights", "input_activations", "output_activations")


def kv_scale_names(layer: int) -> list[tuple[str, str]]:
    """The names that a checkpoint may give to the scales of a layer's keys and values, the
    likeliest pair first."""
    prefix = f"model.layers.{layer}.self_attn"
    return [(f"{prefix}.{key}", f"{prefix}.{value}") for key, value in SPELLINGS]


def kv_scales_rule(layer: int, tensors: ScaleTensors, heads: int) -> Rule:
    """The rule of the parameter `[K, 2]` with a layer's scales, for `heads` stored KV heads.

    A tensor holds one number for all heads, or one for each of the model's own heads.
    """
    sizes = [math.prod(shape) for _, shape in tensors]
    pieces = (
        Piece(name, shape, (size, 1), side, heads // size)
        for side, ((name, shape), size) in enumerate(zip(tensors, sizes, strict=True))
    )
    return Rule(f"layers.{layer}.attention.kv_scales", tuple(pieces))


def kv_cache_dtype(quantisation: Any) -> str | None:
    """The `--kv-cache-dtype` that a `quantization_config` wants: "fp8_e4m3" or "auto".

    Both compressed-tensors and modelopt are read, the latter also in the form of its own
    hf_quant_config.json. None: weights or activations are quantised, or the pages otherwise.
    """
    if not isinstance(quantisation, dict):
        return None
    own = quantisation.get("quantization")  # of hf_quant_config.json
    wanted = own if isinstance(own, dict) else quantisation
    groups, scheme = wanted.get("config_groups") or {}, wanted.get("kv_cache_scheme")
    if quantisation.get("quant_method", "modelopt") not in ("compressed-tensors", "modelopt"):
        return None
    if any(part.get("quant_algo") or _changes_weights(part) for part in (quantisation, wanted)):
        return None
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) and not any(map(group.get, SCHEMES)) for group in groups.values()
    ):
        return None
    if isinstance(scheme, dict):
        return "fp8_e4m3" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else None
    algorithm = wanted.get("kv_cache_quant_algo", "") if scheme is None else ""
    return "fp8_e4m3" if algorithm == "FP8" else "auto" if algorithm is None else None


def _changes_weights(quantisation: dict[str, Any]) -> bool:
    """Whether weights are stored sparse, or activations are rotated before them."""
    sparsity = quantisation.get("sparsity_config")
    return bool(quantisation.get("transform_config")) or (
        isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")
    )
