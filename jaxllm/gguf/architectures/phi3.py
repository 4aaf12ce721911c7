"""Phi 3, 3.5 and 4, whose long texts turn by factors that are tensors here."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config, long_rope
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "rope_factors_short": None,
    "rope_factors_long": None,
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    own = model.metadata
    width, heads = own.count("embedding_length"), own.count("attention.head_count")
    turning, dim = own.count("rope.dimension_count"), width // heads if width and heads else None
    scale = own.number("rope.scaling.attn_factor")
    short, long = "rope_factors_short.weight", "rope_factors_long.weight"
    scaled = {} if scale is None else {"attention_factor": scale}
    return base_config(
        model,
        "phi3",
        sliding_window=own.count("attention.sliding_window") or None,
        rope_scaling=long_rope(model, short, long, **scaled),
        original_max_position_embeddings=own.count("rope.scaling.original_context_length"),
        partial_rotary_factor=turning / dim if turning and dim and turning < dim else None,
    )


ARCHITECTURE = Architecture(config, NAMES)
