"""ERNIE 4.5 with mixtures: experts chosen by corrected softmax, shared ones beside them; heads turn
in pairs of neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models.config.mixture import (
    mixture,
    mixture_names,
    mixture_spec,
    routed,
    shared_experts,
    shared_names,
)
from jaxllm.models.config.read import Config, flag, optional, positive, whole
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import Router
from jaxllm.nn.mlp import FeedForward, GatedMLP
from jaxllm.nn.rules import Piece, Rule

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
STATICS = "moe_statics.e_score_correction_bias"
NAMES = {
    **LLAMA_NAMES,
    # As published, and as transformers calls it
    **mixture_names(router=("gate.weight", STATICS, "gate.weight", f"gate.{STATICS}")),
    **shared_names("mlp.shared_experts"),
    "logits_bias": ("lm_head",),
}
PREFIXES = {"model.mtp_": None}  # parts that predict further tokens
REMOTE_CODE = ("modeling_ernie4_5_moe",)
LEAST_SUM = 1e-6  # that weights of chosen experts are divided by
SIZES = ("moe_num_experts", "moe_intermediate_size", "moe_k")


class StaticsRouter(Router):
    """A router whose correction is stored as one row, `[1, E]`."""

    def rules(self, *names: str) -> Iterator[Rule]:
        weight, correction = super().rules(*names)
        yield weight
        first, *others = (tuple(map(_row, form)) for form in correction.forms)
        yield replace(correction, pieces=first, others=tuple(others))


def _row(piece: Piece) -> Piece:
    return replace(piece, source=(1, *piece.source))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    least = optional(hf, "moe_norm_min")
    if least is not None and least > LEAST_SUM:
        raise ConfigError(
            f"config.json: moe_norm_min is {least:g}; at most {LEAST_SUM:g}, which changes no "
            "weight, is supported"
        )
    return mixture_spec(transformer_spec(hf, paired=True), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "use_bias")
    interval = positive(hf, "moe_layer_interval")
    start = whole(hf, "moe_layer_start_index")
    last = positive(hf, "num_hidden_layers") - 1
    if hf.get("moe_layer_end_index") not in (None, -1):
        last = whole(hf, "moe_layer_end_index")
    shared = shared_experts(hf, "moe_num_shared_experts")

    def gated(inner: int) -> GatedMLP:
        return GatedMLP(init, spec.width, inner, shards, spec.activation, bias)

    def mlp(layer: int) -> FeedForward:
        if (layer + 1) % interval or not start <= layer <= last:
            return gated(positive(hf, "intermediate_size"))
        beside = None
        if shared:
            beside = gated(sizes.inner * shared)
        return routed(spec, shards, init, sizes, beside, router=StaticsRouter, corrected=True)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=bias, out_bias=bias), mlp(layer))

    return parts.decoder(block, head_bias=bias)
