"""Gemma 3, the language model alone. Linear scaling stretches the layers that see all."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.architectures import gemma2
from jaxllm.gguf.config import base_config, layer_types
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model

LARGEST = 62


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    own = model.metadata
    return base_config(
        model,
        "gemma3_text",
        sliding_window=own.count("attention.sliding_window"),
        **windows(own),
        rope_local_base_freq=own.number("rope.freq_base_swa"),
        final_logit_softcapping=own.number("final_logit_softcapping"),
        query_pre_attn_scalar=gemma2.score_width(own, LARGEST),
    )


def windows(own: Metadata) -> dict[str, Any]:
    """Which layers slide, where the file says so: every layer's, or how often one sees all."""
    given = own.get("attention.sliding_window_pattern")
    if not isinstance(given, list):
        return {"sliding_window_pattern": given or None}
    return {"layer_types": layer_types(given)}


ARCHITECTURE = Architecture(config, gemma2.NAMES, gemma2.CHANGES)
