"""MPT: ALiBi, layer norms without biases, a feed-forward without a gate. Queries, keys and values
are one tensor, and may be clipped."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from jaxllm.config import ConfigError
from jaxllm.models.config.alibi import with_alibi
from jaxllm.models.config.read import Config, number, optional, positive, settings_of
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import BiasedKeys, Clipped
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rope import Rotation

SPELLING = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS: Config = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "expansion_ratio": 4,
    "no_bias": True,
    "tie_word_embeddings": True,
}
NAMES = {
    "embed": ("transformer.wte",),
    "norm": ("transformer.norm_f",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": ("transformer.blocks.{}.norm_1",),
    "layers.{}.attention.qkv": ("transformer.blocks.{}.attn.Wqkv",),
    "layers.{}.attention.out": ("transformer.blocks.{}.attn.out_proj",),
    "layers.{}.mlp_norm": ("transformer.blocks.{}.norm_2",),
    "layers.{}.mlp.up": ("transformer.blocks.{}.ffn.up_proj",),
    "layers.{}.mlp.down": ("transformer.blocks.{}.ffn.down_proj",),
}
TOKEN_HEAD = "classifier"
REMOTE_CODE = ("modeling_mpt",)
# Other values are of models that transformers does not compute, either
FIXED: Config = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "no_bias": True,
    "logit_scale": None,
}


@dataclass(frozen=True)
class ClippedBiasedKeys(BiasedKeys):
    """Queries, keys and values are clipped, then scores get what the rotation has for keys."""

    limit: float

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        clipped_TXCH, rotation = Clipped(self.limit)(row_TXCH, queries, rotation, context)
        return super().__call__(clipped_TXCH, queries, rotation, context)


def read(hf: Config) -> dict[str, Any]:
    """The configuration with the settings of attention beside the others."""
    outer = {key: value for key, value in hf.items() if key != "attn_config"}
    return {**settings_of(hf, "attn_config"), **outer}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    for key, value in FIXED.items():
        if (setting := hf.get(key, value)) != value:
            raise ConfigError(
                f"config.json: {key} is {setting!r:.80}; MPT runs where it is {value}"
            )
    fixed = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "gelu"}
    inner = positive(hf, "expansion_ratio") * positive(hf, "hidden_size")
    plain = transformer_spec({**hf, **fixed, "intermediate_size": inner}, still=True)
    return replace(with_alibi(plain, scale=_scale(plain)), config=hf)


def _scale(spec: ModelSpec) -> float:
    """The number that scores are multiplied by."""
    return number(spec.config, "softmax_scale", spec.heads(1).dim ** -0.5)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, functools.partial(LayerNorm, bias=False))
    dim = parts.heads.dim
    limit = optional(spec.config, "clip_qkv")
    if limit is None:
        head_map = BiasedKeys(dim)
    else:
        head_map = ClippedBiasedKeys(dim, limit)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, scale=_scale(spec), head_map=head_map)
        return parts.block(attention, parts.mlp(bias=False))

    return parts.decoder(block)
