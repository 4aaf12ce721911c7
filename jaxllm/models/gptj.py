"""GPT-J: attention and feed-forward beside each other behind one norm, neighbours of a part of each
head turn together, a head of its own with a bias."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.config.read import Config, with_inner
from jaxllm.models.config.rope import rotary_share
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.models.gpt2 import IGNORED as IGNORED
from jaxllm.models.gpt2 import SPELLING as SPELLING
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm

DEFAULTS: Config = {
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
}
NAMES = {
    "embed": ("transformer.wte",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "logits_bias": ("lm_head",),
    "layers.{}.attention_norm": ("transformer.h.{}.ln_1",),
    "layers.{}.attention.qkv": tuple(f"transformer.h.{{}}.attn.{part}_proj" for part in "qkv"),
    "layers.{}.attention.out": ("transformer.h.{}.attn.out_proj",),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.fc_in",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.fc_out",),
}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    sizes = {**hf, "partial_rotary_factor": rotary_share(hf)}
    plain = transformer_spec(with_inner(sizes), partial=True, paired=True)
    return replace(plain, config=hf, carry_width=2 * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)

    def block(layer: int) -> Block:
        return parts.parallel_block(parts.attention(layer), parts.mlp())

    return parts.decoder(block, head_bias=True)
