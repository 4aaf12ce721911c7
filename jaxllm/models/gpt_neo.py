"""GPT-Neo: learned positions, windows on some layers, scores that are products without a scale."""

from __future__ import annotations

from contextlib import suppress

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, positive, with_inner
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, Parts, transformer_spec, type_window
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm

SPELLING = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "window_size": "sliding_window",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS: Config = {
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "attention_types": [[["global", "local"], 12]],
    "sliding_window": 256,
    "tie_word_embeddings": True,
}
ATTENTION = "transformer.h.{}.attn.attention."
NAMES = {
    "embed": ("transformer.wte",),
    "embed.positions": ("transformer.wpe",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": ("transformer.h.{}.ln_1",),
    "layers.{}.attention.qkv": tuple(f"{ATTENTION}{part}_proj" for part in "qkv"),
    "layers.{}.attention.out": (ATTENTION + "out_proj",),
    "layers.{}.mlp_norm": ("transformer.h.{}.ln_2",),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
}
TOKEN_HEAD = "classifier"
IGNORED = (ATTENTION + "bias", ATTENTION + "masked_bias")
TYPES = {"global": FULL, "local": SLIDING}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    sizes = with_inner({**hf, "layer_types": _layer_types(hf)})
    return transformer_spec(sizes, type_window(sizes), still=True)


def _layer_types(hf: Config) -> list[str]:
    """The type of each layer, by `attention_layers` or else by `attention_types`, whose entries are
    names and how often these follow each other. Raises ConfigError."""
    layers = positive(hf, "num_hidden_layers")
    names = hf.get("attention_layers")
    key = "attention_layers"
    if names is None:
        key = "attention_types"
    with suppress(KeyError, TypeError, ValueError):
        if names is None:
            pairs = hf[key]
        else:
            pairs = [(names, 1)]
        types = [TYPES[name] for names, count in pairs for name in names * min(count, layers + 1)]
        if len(types) == layers:
            return types
    raise ConfigError(
        f"config.json: {key} is {hf[key]!r:.80}; it must give {layers} layers 'global' or 'local'"
    )


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, out_bias=True, scale=1.0), parts.mlp())

    return parts.decoder(block, embed=parts.positioned())
