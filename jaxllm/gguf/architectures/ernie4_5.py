"""ERNIE 4.5 without experts."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(model, "ernie4_5", use_bias="blk.0.attn_q.bias" in model.tensors)


ARCHITECTURE = Architecture(config, LLAMA_NAMES)
