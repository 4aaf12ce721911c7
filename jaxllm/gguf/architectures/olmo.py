"""OLMo. Converters put the rows of queries and keys into another order, as Llama's."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    return base_config(model, "olmo", clip_qkv=model.metadata.number("attention.clamp_kqv"))


ARCHITECTURE = Architecture(config, LLAMA_NAMES, llama.CHANGES)
