"""EXAONE 4, whose norms follow attention and feed-forward."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.architectures import gemma3, olmo2
from jaxllm.gguf.config import base_config, stretched
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    window = metadata.count("attention.sliding_window")
    settings = base_config(model, "exaone4", **gemma3.windows(metadata), **stretched(model))
    return settings | {"sliding_window": window}


ARCHITECTURE = Architecture(config, olmo2.NAMES)
