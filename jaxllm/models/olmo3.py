"""OLMo 3: OLMo 2 with a window on three of four layers; RoPE is scaled on the others alone."""

from __future__ import annotations

from jaxllm.models import olmo2
from jaxllm.models.config.read import Config, number, settings_of
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, transformer_spec, type_window, typed

DEFAULTS: Config = {**olmo2.DEFAULTS, "sliding_window": 4096}
NAMES = olmo2.NAMES
build = olmo2.build
THETA = 500_000.0


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    hf = typed(hf, lambda layer: SLIDING if (layer + 1) % 4 else FULL)
    base = {"rope_theta": number(hf, "rope_theta", THETA)}
    nested = settings_of(hf, "rope_parameters")
    ropes = {
        FULL: {**base, **settings_of(hf, "rope_scaling"), **settings_of(nested, FULL)},
        SLIDING: {**base, **settings_of(nested, SLIDING)},
    }
    hf = {**hf, "rope_parameters": ropes, "rope_scaling": None}
    return transformer_spec(hf, type_window(hf))
