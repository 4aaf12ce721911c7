"""Phi-1, 1.5 and 2: attention and feed-forward beside each other under one norm, biases everywhere,
a part of each head turns. Query and key heads may have layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.rope import check_even
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import HeadLayerNorm, NormedHeads
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Ordered, Piece, Rule

REMOTE_CODE = ("modeling_phi",)
SPELLING = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS: Config = {
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}
NAMES = {
    **LLAMA_NAMES,
    "norm": ("model.final_layernorm",),
    "logits_bias": ("lm_head",),
    "layers.{}.attention.out": ("model.layers.{}.self_attn.dense",),
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_layernorm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_layernorm",),
    "layers.{}.mlp.up": ("model.layers.{}.mlp.fc1",),
    "layers.{}.mlp.down": ("model.layers.{}.mlp.fc2",),
}


class SharedLayerNorm(HeadLayerNorm):
    """A layer norm of heads that all have one weight and one bias, [H] each."""

    def __init__(self, init: Init, heads: Heads, eps: float, *, keys: bool):
        self.weight = init.full((heads.stored_dim,), ("head_dim",), 1.0)
        self.bias = init.full((heads.stored_dim,), ("head_dim",), 0.0)
        self.heads = heads
        self.eps = eps

    def __call__(self, x_TXCH: Array, context: RowContext) -> Array:
        weight_H, bias_H = (leaf[...].astype(jnp.float32) for leaf in (self.weight, self.bias))
        return (self.standard(x_TXCH) * weight_H + bias_H).astype(x_TXCH.dtype)

    def rules(self, name: str) -> Iterator[Rule]:
        source = (self.heads.dim,)
        view = (self.heads.stored_dim,)
        steps = (Ordered(source, 0, self.heads.key_order),) if self.heads.key_order else ()
        for leaf in ("weight", "bias"):
            yield Rule(leaf, (Piece(f"{name}.{leaf}", source, view, steps=steps),))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = transformer_spec(hf, partial=True)
    check_even(hf, plain.heads(1).dim)
    return replace(plain, carry_width=2 * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    normed = flag(spec.config, "qk_layernorm")

    def block(layer: int) -> Block:
        norms = NormedHeads(init, parts.heads, spec.norm_eps, SharedLayerNorm) if normed else None
        attention = parts.attention(layer, qkv_bias=True, out_bias=True, head_map=norms)
        return parts.parallel_block(attention, parts.mlp())

    return parts.decoder(block, head_bias=True)
