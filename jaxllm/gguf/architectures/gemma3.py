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
    metadata = model.metadata
    return base_config(
        model,
        "gemma3_text",
        sliding_window=metadata.count("attention.sliding_window"),
        **windows(metadata),
        rope_local_base_freq=metadata.number("rope.freq_base_swa"),
        final_logit_softcapping=metadata.number("final_logit_softcapping"),
        query_pre_attn_scalar=gemma2.score_width(metadata, LARGEST),
    )


def windows(metadata: Metadata) -> dict[str, Any]:
    """Which layers slide, where the file says so: every layer's, or how often one sees all."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {"sliding_window_pattern": pattern or None}
    return {"layer_types": layer_types(pattern)}


ARCHITECTURE = Architecture(config, gemma2.NAMES, gemma2.CHANGES)
