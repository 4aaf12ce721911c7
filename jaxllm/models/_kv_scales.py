"""Scales that a checkpoint brings for keys and values of 8 bits: under which names, and what its configuration says of them. Imports no
jax."""

from __future__ import annotations

import math
from typing import Any

from jaxllm.models._rules import Piece, Rule

KV_SCALES = "KV scales"  # a configuration's key, which no file has: for each layer the `Tensors` to use, None for none
SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)

type Tensors = list[tuple[str, tuple[int, ...]]]  # name and shape: of a layer's keys, of its values


def kv_scale_names(layer: int) -> list[tuple[str, str]]:
    """Under which names a checkpoint may bring the scales of a layer's keys and values, the likeliest first."""
    prefix = f"model.layers.{layer}.self_attn"
    return [(f"{prefix}.{key}", f"{prefix}.{value}") for key, value in SPELLINGS]


def kv_scales_rule(layer: int, tensors: Tensors, heads: int) -> Rule:
    """The parameter `[K, 2]` of a layer's scales, for `heads` KV heads as they are stored: tensors of one number for all of them, or of one
    for each head, which several shards may hold."""
    sizes = [math.prod(shape) for _, shape in tensors]
    pieces = (
        Piece(name, shape, (size, 1), side, heads // size) for side, ((name, shape), size) in enumerate(zip(tensors, sizes, strict=True))
    )
    return Rule(f"layers.{layer}.attention.kv_scales", tuple(pieces))


def quantises_kv_alone(config: Any) -> bool:
    """Whether a `quantization_config` leaves the weights as they are and speaks of 8-bit floats as keys and values."""
    scheme = config.get("kv_cache_scheme") if isinstance(config, dict) and not config.get("config_groups") else None
    return isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
