"""Nemotron and Minitron. Converters add one to the factors of norms."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.changes import plus
from jaxllm.gguf.config import base_config, turning_share
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(
        model,
        "nemotron",
        norm_eps=model.metadata.number("attention.layer_norm_epsilon"),
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        mlp_bias="blk.0.ffn_up.bias" in model.tensors,
        partial_rotary_factor=_turning(model.metadata),
    )


def _turning(metadata: Metadata) -> float | None:
    """The part of a head that turns; None for the usual half, where converters count dimensions of
    heads of another width than these have."""
    width = metadata.count("embedding_length")
    heads = metadata.count("attention.head_count")
    dim = metadata.count("attention.key_length")
    unlike_width = dim is not None and width and heads and dim != width // heads
    if unlike_width:
        return None
    return turning_share(metadata)


def _less_one(tensor: Deferred, metadata: Metadata) -> Deferred:
    return plus(tensor, -1)


NORMS = ("output_norm", "blk.{}.attn_norm", "blk.{}.ffn_norm")
CHANGES = {f"{norm}.weight": _less_one for norm in NORMS}
ARCHITECTURE = Architecture(config, LLAMA_NAMES, CHANGES)
