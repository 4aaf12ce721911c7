"""Command R: attention and feed-forward read one norm, beside each other; neighbours turn together;
logits are scaled."""

from __future__ import annotations

import functools
from dataclasses import replace

from jaxllm.models.config.read import Config, flag, number
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import HeadLayerNorm, NormedHeads
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Scale
from jaxllm.nn.norm import LayerNorm

SPELLING = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_norm",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = transformer_spec(hf, paired=True)
    return replace(plain, carry_width=2 * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, functools.partial(LayerNorm, bias=False))
    bias, normed = (flag(spec.config, key) for key in ("attention_bias", "use_qk_norm"))

    def block(layer: int) -> Block:
        norms = None
        if normed:
            norms = NormedHeads(init, parts.heads, spec.norm_eps, HeadLayerNorm)
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms)
        return parts.parallel_block(attention, parts.gated_mlp())

    return parts.decoder(block, logits_maps=(Scale(number(spec.config, "logit_scale")),))
