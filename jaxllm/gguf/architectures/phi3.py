"""Phi 3, 3.5 and 4, whose long texts turn by factors that are tensors here."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config, long_rope
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model

NAMES = {
    **LLAMA_NAMES,
    "rope_factors_short": None,
    "rope_factors_long": None,
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
# of tokenizer.ggml.token_type
CONTROL = 3
USER_DEFINED = 4
END = "</s>"
KEEP_SPACES = ("<s>", "<|endoftext|>")


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    width = metadata.count("embedding_length")
    heads = metadata.count("attention.head_count")
    turning = metadata.count("rope.dimension_count")
    dim = None
    if width and heads:
        dim = width // heads
    scale = metadata.number("rope.scaling.attn_factor")
    short = "rope_factors_short.weight"
    long = "rope_factors_long.weight"
    if scale is not None:
        scaled = {"attention_factor": scale}
    else:
        scaled = {}
    return base_config(
        model,
        "phi3",
        sliding_window=metadata.count("attention.sliding_window") or None,
        rope_scaling=long_rope(model, short, long, **scaled),
        original_max_position_embeddings=metadata.count("rope.scaling.original_context_length"),
        partial_rotary_factor=turning / dim if turning and dim and turning < dim else None,
    )


def added(metadata: Metadata) -> dict[str, Any]:
    """Special tokens of Phi 3, behind most of which text loses its first spaces. Phi 4 has byte
    pairs, and keeps them."""
    if metadata.text(".tokenizer.ggml.model") != "llama":
        return {}
    tokens = metadata.items(".tokenizer.ggml.tokens", str) or []
    kinds = metadata.items(".tokenizer.ggml.token_type", int) or []
    return {
        str(id): {
            "content": text,
            "special": token_type == CONTROL,
            "normalized": False,
            "rstrip": text not in KEEP_SPACES,
        }
        for id, (text, token_type) in enumerate(zip(tokens, kinds, strict=False))
        if text and (token_type in (CONTROL, USER_DEFINED) or text == END)
    }


ARCHITECTURE = Architecture(config, NAMES, added=added)
