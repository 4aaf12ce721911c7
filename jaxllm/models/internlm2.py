"""InternLM 2: Llama with names of its own; queries, keys and values are one tensor, group by group.
Its checkpoints name code of their own, which is not run."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.rules import Layout

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bias": True,
}
NAMES = {
    "embed": ("model.tok_embeddings",),
    "norm": ("model.norm",),
    "head": ("output",),
    "layers.{}.attention_norm": ("model.layers.{}.attention_norm",),
    "layers.{}.attention.qkv": ("model.layers.{}.attention.wqkv",),
    "layers.{}.attention.out": ("model.layers.{}.attention.wo",),
    "layers.{}.mlp_norm": ("model.layers.{}.ffn_norm",),
    "layers.{}.mlp.gate_up": (
        "model.layers.{}.feed_forward.w1",
        "model.layers.{}.feed_forward.w3",
    ),
    "layers.{}.mlp.down": ("model.layers.{}.feed_forward.w2",),
}
REMOTE_CODE = ("modeling_internlm2",)
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        attention.qkv.layout = Layout.GROUPED
        return parts.block(attention, parts.gated_mlp())

    return parts.decoder(block)
