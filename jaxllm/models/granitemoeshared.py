"""Granite-MoE with a feed-forward beside the experts that computes every token."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models import granitemoe
from jaxllm.models.config.read import Config, whole
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import FeedForward, GatedMLP

DEFAULTS: Config = {**granitemoe.DEFAULTS, "shared_intermediate_size": 0}
NAMES = {
    **granitemoe.NAMES,
    "layers.{}.mlp.shared.gate_up": ("model.layers.{}.shared_mlp.input_linear",),
    "layers.{}.mlp.shared.down": ("model.layers.{}.shared_mlp.output_linear",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = granitemoe.spec(hf)
    inner = whole(hf, "shared_intermediate_size")
    return replace(plain, inner_width=max(plain.inner_width, inner))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    inner = whole(spec.config, "shared_intermediate_size")

    def shared() -> FeedForward | None:
        if not inner:
            return None
        return GatedMLP(init, spec.width, inner, shards, spec.activation)

    return granitemoe.granite(Parts(spec, shards, init), shared)
