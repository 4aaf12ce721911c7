"""Gemma 3, the language model alone. Linear scaling stretches the layers that see all."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.architectures import gemma2
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model

LARGEST = 62


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    own = model.metadata
    return base_config(
        model,
        "gemma3_text",
        sliding_window=own.count("attention.sliding_window"),
        rope_local_base_freq=own.number("rope.freq_base_swa"),
        final_logit_softcapping=own.number("final_logit_softcapping"),
        query_pre_attn_scalar=gemma2.score_width(own, LARGEST),
    )


ARCHITECTURE = Architecture(config, gemma2.NAMES, gemma2.CHANGES)
