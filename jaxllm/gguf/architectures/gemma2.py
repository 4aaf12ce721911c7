"""Gemma 2. Converters add one to the weights of norms."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.changes import plus
from jaxllm.gguf.config import base_config
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

LARGEST = 46  # layers of the model whose scores are scaled by the width of the model
NAMES = {
    **LLAMA_NAMES,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
NORMS = ("attn", "post_attention", "ffn", "post_ffw", "attn_q", "attn_k")


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "gemma2",
        sliding_window=metadata.count("attention.sliding_window"),
        attn_logit_softcapping=metadata.number("attn_logit_softcapping"),
        final_logit_softcapping=metadata.number("final_logit_softcapping"),
        query_pre_attn_scalar=score_width(metadata, LARGEST),
    )


def score_width(metadata: Metadata, largest: int) -> int:
    """What scores are divided by the root of: the width of a head, in the largest model the
    model's width by its heads."""
    heads = metadata.count("attention.head_count")
    width = metadata.count("embedding_length")
    if metadata.count("block_count") == largest and heads and width:
        return width // heads
    return metadata.count("attention.key_length") or 256


def _minus_one(tensor: Deferred, metadata: Metadata) -> Deferred:
    return plus(tensor, -1.0)


CHANGES = {
    "output_norm": _minus_one,
    **{f"blk.{{}}.{norm}_norm": _minus_one for norm in NORMS},
}
ARCHITECTURE = Architecture(config, NAMES, CHANGES)
