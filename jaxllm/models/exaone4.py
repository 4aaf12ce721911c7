"""EXAONE 4: norms after each part alone and of each query and key head. Where three of four layers
have a window, the others know no positions."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    FULL,
    LLAMA_NAMES,
    SLIDING,
    Parts,
    transformer_spec,
    type_window,
    typed,
)
from jaxllm.nn.blocks import Block, PostNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.rope import NoRope

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention_norm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp_norm": ("model.layers.{}.post_feedforward_layernorm",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if hf.get("sliding_window") is None:
        return transformer_spec(typed(hf, lambda layer: FULL))
    if hf.get("layer_types") is None:
        every = positive(hf, "sliding_window_pattern")
        hf = typed(hf, lambda layer: SLIDING if (layer + 1) % every else FULL)
    plain = transformer_spec(hf, type_window(hf))
    still = NoRope(plain.heads(1).dim // 2)
    ropes = (
        still if window is None else rope
        for rope, window in zip(plain.ropes, plain.windows, strict=True)
    )
    return replace(plain, ropes=tuple(ropes))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qk_norms=parts.qk_norms())
        return parts.block(attention, parts.gated_mlp(), PostNormBlock)

    return parts.decoder(block)
