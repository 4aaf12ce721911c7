"""Arcee, whose rows converters order as those of Llama."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(
        model,
        "arcee",
        attention_bias="blk.0.attn_q.bias" in model.tensors,
        mlp_bias="blk.0.ffn_up.bias" in model.tensors,
    )


ARCHITECTURE = Architecture(config, LLAMA_NAMES, llama.CHANGES)
