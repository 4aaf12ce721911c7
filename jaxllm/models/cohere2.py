"""Command R7B and Command A: Command R with a window on three of four layers; the others see all
and know no positions."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models import cohere
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, transformer_spec, type_window, typed
from jaxllm.nn.rope import NoRope

SPELLING = cohere.SPELLING
NAMES = cohere.NAMES
build = cohere.build
DEFAULTS: Config = {**cohere.DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    every = positive({"sliding_window_pattern": 4, **hf}, "sliding_window_pattern")
    hf = typed(hf, lambda layer: SLIDING if (layer + 1) % every else FULL)
    plain = transformer_spec(hf, type_window(hf), paired=True)
    still = NoRope(plain.heads(1).dim // 2)
    ropes = (
        still if window is None else rope
        for rope, window in zip(plain.ropes, plain.windows, strict=True)
    )
    return replace(plain, carry_width=2 * plain.width, ropes=tuple(ropes))
