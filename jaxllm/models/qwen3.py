"""Qwen3: Qwen2 with norms on query and key heads, and a head width of its own."""

from __future__ import annotations

from jaxllm.models import qwen2
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import transformer
from jaxllm.nn.attention import Attention
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {**qwen2.DEFAULTS, "head_dim": 128}
NAMES, spec = qwen2.NAMES, qwen2.spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    heads, bias = spec.heads(shards), flag(spec.config, "attention_bias")

    def attention(layer: int) -> Attention:
        return Attention(
            init,
            heads,
            spec.width,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm_eps=spec.norm_eps,
            window=spec.windows[layer],
        )

    return transformer(spec, shards, init, attention)
