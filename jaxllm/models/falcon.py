"""Falcon: attention and feed-forward beside each other, with one norm or two, or after each other.
Queries, keys and values are one tensor, group by group. Heads turn, or have ALiBi."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxllm.models.config.alibi import with_alibi
from jaxllm.models.config.read import Config, flag, with_inner
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block, ParallelBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import BiasedKeys
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rope import RoundedAlibi
from jaxllm.nn.rules import Layout, Rule

SPELLING = {
    "n_embed": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS: Config = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}
NAMES = {
    "embed": ("transformer.word_embeddings",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.{}.attention.qkv": ("transformer.h.{}.self_attention.query_key_value",),
    "layers.{}.attention.out": ("transformer.h.{}.self_attention.dense",),
    "layers.{}.attention_norm": ("transformer.h.{}.input_layernorm", "transformer.h.{}.ln_attn"),
    "layers.{}.mlp_norm": ("transformer.h.{}.post_attention_layernorm", "transformer.h.{}.ln_mlp"),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.dense_h_to_4h",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.dense_4h_to_h",),
}
TOKEN_HEAD = "classifier"
REMOTE_CODE = ("modeling_falcon",)


class TwoNameNorm(LayerNorm):
    """A layer norm that checkpoints call by one of two names."""

    def rules(self, *names: str) -> Iterator[Rule]:
        first, second = map(super().rules, names)
        for rule, second_rule in zip(first, second, strict=True):
            yield replace(rule, others=(second_rule.pieces,))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    new = flag(hf, "new_decoder_architecture")
    heads = hf.get("num_kv_heads")
    if flag(hf, "multi_query") and not new:
        heads = 1
    alibi = flag(hf, "alibi")
    parallel = new or flag(hf, "parallel_attn")
    plain = transformer_spec(with_inner({**hf, "num_key_value_heads": heads}), still=alibi)
    if alibi:
        plain = with_alibi(plain, RoundedAlibi)
    return replace(plain, config=hf, carry_width=(2 if parallel else 1) * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    hf = spec.config
    bias = flag(hf, "bias")
    new = flag(hf, "new_decoder_architecture")
    block_class = Block
    if new or flag(hf, "parallel_attn"):
        block_class = ParallelBlock
    if new:
        one_norm = hf.get("num_ln_in_parallel_attn") == 1
    else:
        one_norm = flag(hf, "parallel_attn")

    head_map = None
    if flag(hf, "alibi"):
        head_map = BiasedKeys(parts.heads.dim)

    def norm() -> LayerNorm:
        return TwoNameNorm(init, spec.width, spec.norm_eps)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=head_map)
        attention.qkv.layout = Layout.GROUPED
        return block_class(
            attention_norm=norm(),
            attention=attention,
            mlp_norm=None if one_norm else norm(),
            mlp=parts.mlp(bias),
        )

    return parts.decoder(block)
