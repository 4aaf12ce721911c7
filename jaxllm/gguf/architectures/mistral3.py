"""Ministral 3, and Mistral Small 3 from a checkpoint that also sees. Converters put the rows of
queries and keys into another order, as Llama's."""

from __future__ import annotations

from typing import Any

from jaxllm.config import ConfigError
from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config, scaling
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model


def config(model: Model) -> dict[str, Any]:
    """The configuration of a Ministral where queries grow with their position, else of a
    Mistral. Raises ConfigError for growth without YaRN, whose length it is counted in."""
    metadata = model.metadata
    growth = metadata.number("attention.temperature_scale")
    if not growth:
        return base_config(model, "mistral") | {"sliding_window": None}
    return base_config(model, "ministral3", rope_scaling=_growing(metadata, growth))


def _growing(metadata: Metadata, growth: float) -> dict[str, Any]:
    """`rope_scaling` with the growth of queries."""
    settings = scaling(metadata)
    if settings is None:
        raise ConfigError(
            f"the GGUF file has attention.temperature_scale {growth:g} without YaRN "
            "(rope.scaling.type and factor), which it needs; convert the checkpoint again"
        )
    equal = metadata.number("rope.scaling.yarn_log_multiplier")  # mscale and mscale_all_dim
    if equal:
        settings["attention_factor"] = 1.0
    return {"llama_4_scaling_beta": growth, **settings}


ARCHITECTURE = Architecture(config, LLAMA_NAMES, llama.CHANGES)
