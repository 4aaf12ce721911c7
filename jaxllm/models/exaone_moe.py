"""K-EXAONE: EXAONE 4's attention under pre-norms; experts chosen by corrected sigmoids, and shared
ones beside them. The first layers are dense."""

from __future__ import annotations

from jaxllm.models import exaone4
from jaxllm.models.config.mixture import (
    mixture,
    mixture_names,
    mixture_spec,
    shared_experts,
    shared_names,
    sigmoid_mixtures,
)
from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    **exaone4.DEFAULTS,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
CORRECTION = "e_score_correction_bias"
ROUTER = ("gate.weight", CORRECTION, "gate.weight", f"gate.{CORRECTION}")  # as published, and newer
NAMES = {**LLAMA_NAMES, **mixture_names(router=ROUTER), **shared_names("mlp.shared_experts")}
SIZES = ("num_experts", "moe_intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(exaone4.spec(hf), mixture(hf, *SIZES))


def unused(spec: ModelSpec) -> tuple[str, ...]:
    """The layer that predicts a further token."""
    return ("mtp.",)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    mlp = sigmoid_mixtures(parts, sizes, shared_experts(hf, "num_shared_experts"))

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qk_norms=parts.qk_norms()), mlp(layer))

    return parts.decoder(block)
