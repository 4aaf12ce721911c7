"""Hunyuan-A13B: query and key heads are normed after they turned; beside the experts a dense
feed-forward computes every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.models import hunyuan_v1_dense
from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed, shared_names
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import TurnedNorms
from jaxllm.nn.linear import Init

DEFAULTS: Config = {**hunyuan_v1_dense.DEFAULTS, "num_experts": 1, "moe_topk": 1}
NAMES = {
    **hunyuan_v1_dense.NAMES,
    **mixture_names(router=("gate.wg.weight",)),
    **shared_names("mlp.shared_mlp"),
}
REMOTE_CODE = ("hunyuan", "modeling_hunyuan")
SIZES = ("num_experts", "intermediate_size", "moe_topk")


def _uniform(hf: Config) -> dict[str, Any]:
    """The configuration with one number where each layer has its own. Raises ConfigError where they
    differ, or where layers share keys and values."""
    config = dict(hf)
    for key in ("num_experts", "moe_topk"):
        if isinstance(hf[key], list):
            if len({str(number) for number in hf[key]}) != 1:
                raise ConfigError(
                    f"config.json: {key} is {hf[key]!r:.80}; layers must have the same"
                )
            config[key] = hf[key][0]
    if flag(hf, "use_cla"):
        raise ConfigError("config.json: use_cla is true; layers that share keys are not supported")
    return config


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    config = _uniform(hf)
    return mixture_spec(hunyuan_v1_dense.spec(config), mixture(config, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    hf = spec.config
    sizes = mixture(_uniform(hf), *SIZES)
    bias = flag(hf, "attention_bias")
    dense = replace(spec, inner_width=sizes.inner)
    exact = replace(init, dtype=jnp.float32)  # the router is kept in float32

    def block(layer: int) -> Block:
        norms = TurnedNorms(parts.heads.dim, *parts.qk_norms())
        shared = Parts(dense, shards, init).gated_mlp()
        mlp = routed(spec, shards, init, sizes, shared, router_init=exact)
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms)
        return parts.block(attention, mlp)

    return parts.decoder(block)
