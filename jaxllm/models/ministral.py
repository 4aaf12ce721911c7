"""Ministral of 2024: Mistral whose layers may see everything or have a window, each by its type."""

from __future__ import annotations

from jaxllm.models import mistral
from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, transformer_spec, type_window, typed

DEFAULTS = mistral.DEFAULTS
NAMES = mistral.NAMES
build = mistral.build


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if hf.get("sliding_window") is None:
        usual = FULL
    else:
        usual = SLIDING
    hf = typed(hf, lambda layer: usual)
    return transformer_spec(hf, type_window(hf))
