"""GPT-NeoX: attention and feed-forward beside each other, a quarter of each head turns."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block, ParallelBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Layout

SPELLING = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
DEFAULTS: Config = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.25,
    "attention_bias": True,
    "use_parallel_residual": True,
}
NAMES = {
    "embed": ("gpt_neox.embed_in",),
    "norm": ("gpt_neox.final_layer_norm",),
    "head": ("embed_out",),
    "layers.{}.attention_norm": ("gpt_neox.layers.{}.input_layernorm",),
    "layers.{}.attention.qkv": ("gpt_neox.layers.{}.attention.query_key_value",),
    "layers.{}.attention.out": ("gpt_neox.layers.{}.attention.dense",),
    "layers.{}.mlp_norm": ("gpt_neox.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
    "layers.{}.mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h",),
}
# As transformers names it since version 5
OTHER_NAMES = ({**NAMES, "head": ("lm_head",)},)
TOKEN_HEAD = "classifier"
IGNORED = tuple(f"gpt_neox.layers.{{}}.attention.{name}" for name in ("bias", "masked_bias"))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = transformer_spec({**hf, "num_key_value_heads": None}, partial=True)
    parallel = flag(hf, "use_parallel_residual")
    return replace(plain, config=hf, carry_width=(2 if parallel else 1) * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    bias = flag(spec.config, "attention_bias")
    if flag(spec.config, "use_parallel_residual"):
        block_class = ParallelBlock
    else:
        block_class = Block

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        attention.qkv.layout = Layout.GROUPED
        return parts.block(attention, parts.mlp(), block_class)

    return parts.decoder(block)
