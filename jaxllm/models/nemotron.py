"""Nemotron and Minitron: layer norms that multiply by 1 + weight, squared ReLU without a gate, half
of each head turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Plus, Rule

SPELLING = {"norm_eps": "rms_norm_eps"}
DEFAULTS: Config = {
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
}
NAMES = {**LLAMA_NAMES, "layers.{}.mlp.up": ("model.layers.{}.mlp.up_proj",)}


class OffsetLayerNorm(LayerNorm):
    """A layer norm whose factor is 1 + stored weight. The sum is kept in float32."""

    def __init__(self, init: Init, width: int, eps: float):
        super().__init__(replace(init, dtype=jnp.float32), width, eps)

    def rules(self, name: str) -> Iterator[Rule]:
        for rule in super().rules(name):
            (piece,) = rule.pieces
            steps = (Plus(1.0),) if rule.parameter == "weight" else ()
            yield replace(rule, pieces=(replace(piece, steps=steps),))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(hf, partial=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, OffsetLayerNorm)
    bias, mlp_bias = (flag(spec.config, key) for key in ("attention_bias", "mlp_bias"))

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.mlp(mlp_bias))

    return parts.decoder(block)
