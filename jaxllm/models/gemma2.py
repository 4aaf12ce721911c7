"""Gemma 2: norms before and after each part, capped scores and logits, a window on every other
layer."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag, number, optional
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
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import Block, SandwichBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import ScaledEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Softcap
from jaxllm.nn.norm import OffsetRMSNorm, RMSNorm

DEFAULTS: Config = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention_out_norm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp_norm": ("model.layers.{}.pre_feedforward_layernorm",),
    "layers.{}.mlp_out_norm": ("model.layers.{}.post_feedforward_layernorm",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if flag(hf, "use_bidirectional_attention"):
        raise ConfigError(
            "config.json: use_bidirectional_attention is true; Gemma runs with causal attention"
        )
    hf = typed(hf, lambda layer: FULL if layer % 2 else SLIDING)
    # Files may have `hidden_act` as well, which no Gemma reads
    return transformer_spec({**hf, "hidden_act": hf["hidden_activation"]}, type_window(hf))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    return gemma(Parts(spec, shards, init, OffsetRMSNorm))


def gemma(parts: Parts, qk_norm: bool = False) -> Decoder:
    """The model of these parts; later Gemmas have norms of query and key heads."""

    def block(layer: int) -> Block:
        return SandwichBlock(
            attention_norm=parts.norm(),
            attention=attention(parts, layer, parts.qk_norms(OffsetRMSNorm) if qk_norm else None),
            attention_out_norm=parts.norm(),
            mlp_norm=parts.norm(),
            mlp=parts.gated_mlp(),
            mlp_out_norm=parts.norm(),
        )

    return decoder(parts, block)


def attention(parts: Parts, layer: int, norms: tuple[RMSNorm, RMSNorm] | None = None) -> Attention:
    """The attention of one layer, its scores scaled and capped as the configuration says."""
    hf = parts.spec.config
    bias = flag(parts.spec.config, "attention_bias")
    return parts.attention(
        layer,
        scale=number(hf, "query_pre_attn_scalar") ** -0.5,
        softcap=optional(hf, "attn_logit_softcapping"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norms=norms,
    )


def decoder(parts: Parts, block: Callable[[int], Block]) -> Decoder:
    """The model of these blocks: embeddings grow with the width, logits may be capped."""
    spec = parts.spec
    factor = parts.rounded(parts.spec.width**0.5)
    cap = optional(spec.config, "final_logit_softcapping")
    embed = ScaledEmbedding(parts.init, spec.vocab_size, spec.width, parts.table_axis, factor)
    return parts.decoder(block, embed=embed, logits_maps=() if cap is None else (Softcap(cap),))
