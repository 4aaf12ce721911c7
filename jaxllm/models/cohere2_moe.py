"""Command A+: Cohere 2 around mixtures of experts, whose sum with the shared ones may be halved.
The first layers may be dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxllm.config import ConfigError
from jaxllm.models import cohere2
from jaxllm.models.config.mixture import (
    dense_layers,
    mixture,
    mixture_names,
    mixture_spec,
    routed,
    shared_experts,
    shared_names,
)
from jaxllm.models.config.read import Config, flag, number, positive, whole
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
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Scale
from jaxllm.nn.mixture.experts import AveragedMLP, MixtureMLP
from jaxllm.nn.mixture.routers import normalised, softmax, unchanged
from jaxllm.nn.mlp import FeedForward, GatedMLP
from jaxllm.nn.norm import LayerNorm, Norm, RMSNorm
from jaxllm.nn.rope import NoRope

DEFAULTS: Config = {
    **cohere2.DEFAULTS,
    "layer_norm_eps": 1e-5,
    "rms_norm_eps": None,
    "head_dim": 128,
    "sliding_window_pattern": 4,
    "prefix_dense_sliding_window_pattern": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
}
NAMES = {**LLAMA_NAMES, **mixture_names(), **shared_names("mlp.shared_experts")}
SIZES = ("num_experts", "intermediate_size")
PREFIX = "prefix_dense_sliding_window_pattern"


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Layers that see everything know no positions, but for
    dense ones where `prefix_dense_sliding_window_pattern` is 1. Raises ConfigError."""
    hf = {"first_k_dense_replace": 0, **hf}
    first = whole(hf, "first_k_dense_replace")
    prefix = positive(hf, PREFIX)
    every = positive(hf, "sliding_window_pattern")

    def usual(layer: int) -> str:
        if layer < first:
            last = (layer + 1) % prefix
        else:
            last = (layer - first + 1) % every
        if last:
            return SLIDING
        return FULL

    hf = typed(hf, usual)
    eps = hf.get("rms_norm_eps")
    if eps is None:
        eps = hf["layer_norm_eps"]
    plain = transformer_spec({**hf, "rms_norm_eps": eps}, type_window(hf), paired=True)
    mixed = mixture_spec(plain, mixture(hf, *SIZES))
    dense = dense_layers(hf)
    still = NoRope(plain.heads(1).dim // 2)
    ropes = (
        rope if window is not None or (prefix == 1 and layer in dense) else still
        for layer, (rope, window) in enumerate(zip(plain.ropes, plain.windows, strict=True))
    )
    widest = max(mixed.inner_width, *_widths(hf))
    mixed = replace(mixed, config=hf, inner_width=widest)
    return replace(mixed, carry_width=2 * plain.width, ropes=tuple(ropes))


def _widths(hf: Config) -> tuple[int, int]:
    """The inner widths of a dense layer's feed-forward and of all shared experts together. Raises
    ConfigError."""
    inner = positive(hf, "intermediate_size")
    dense_key = "prefix_dense_intermediate_size"
    if hf.get(dense_key) is None:
        dense = inner
    else:
        dense = positive(hf, dense_key)
    return dense, shared_experts(hf, "num_shared_experts") * inner


def _choice(hf: Config, key: str, *known: str) -> str:
    value = hf.get(key)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(
            f"config.json: {key} is {value!r:.80}; it must be {' or '.join(map(repr, known))}"
        )
    return value


def _routing(hf: Config) -> dict[str, Any]:
    """Fields of `nn.routers.Routing`. Raises ConfigError."""
    if _choice(hf, "expert_selection_fn", "softmax", "sigmoid") == "softmax":  # of the chosen
        return {"score": unchanged, "weigh": softmax}
    if flag(hf, "norm_topk_prob"):
        weigh = normalised
    else:
        weigh = unchanged
    return {"score": jax.nn.sigmoid, "weigh": weigh}


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    sizes = mixture(spec.config, *SIZES)
    dense = dense_layers(spec.config)
    norm: Callable[[Init, int, float], Norm] = RMSNorm
    if hf.get("rms_norm_eps") is None:
        norm = partial(LayerNorm, bias=False)
    parts = Parts(spec, shards, init, norm)
    bias = flag(hf, "attention_bias")
    dense_width, shared_width = _widths(hf)
    how = _choice(hf, "shared_expert_combination_strategy", "average", "sum")

    def gated(inner: int) -> GatedMLP:
        return GatedMLP(init, spec.width, inner, shards, spec.activation)

    def mlp(layer: int) -> FeedForward:
        if layer in dense:
            return gated(dense_width)
        made = routed(spec, shards, init, sizes, **_routing(hf))
        if not shared_width:
            return made
        if how == "average":
            mlp_class = AveragedMLP
        else:
            mlp_class = MixtureMLP
        return mlp_class(made.router, made.experts, gated(shared_width))

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.parallel_block(attention, mlp(layer))

    return parts.decoder(block, logits_maps=(Scale(number(hf, "logit_scale")),))
