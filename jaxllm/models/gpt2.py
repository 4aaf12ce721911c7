"""GPT-2: learned positions, layer norms, a feed-forward without a gate, transposed weights."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag, with_inner
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Layout

SPELLING = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS: Config = {
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
NAMES = {
    "embed": ("transformer.wte",),
    "embed.positions": ("transformer.wpe",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": ("transformer.h.{}.ln_1",),
    "layers.{}.attention.qkv": ("transformer.h.{}.attn.c_attn",),
    "layers.{}.attention.out": ("transformer.h.{}.attn.c_proj",),
    "layers.{}.mlp_norm": ("transformer.h.{}.ln_2",),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
}
TOKEN_HEAD = "classifier"
# Methods that store the matrices that they pack as those of other families, [out, in]
TURNING = ("auto-round", "bitsandbytes", "gptq")
GENERATES = ("GPT2LMHeadModel",)
IGNORED = ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec(with_inner(hf), still=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    hf = spec.config
    scale = 1.0
    if flag(hf, "scale_attn_weights"):
        scale = parts.heads.dim**-0.5
    falling = flag(hf, "scale_attn_by_inverse_layer_idx")

    def block(layer: int) -> Block:
        if falling:
            layer_scale = scale / (layer + 1)
        else:
            layer_scale = scale
        attention = parts.attention(layer, qkv_bias=True, out_bias=True, scale=layer_scale)
        mlp = parts.mlp()
        turns = spec.scheme is not None and spec.scheme.method in TURNING
        for linear in (attention.qkv, attention.out, mlp.up, mlp.down):
            if turns:
                linear.layout = Layout.OUT_IN_PACKED
            else:
                linear.layout = Layout.IN_OUT
        return parts.block(attention, mlp)

    return parts.decoder(block, embed=parts.positioned())
