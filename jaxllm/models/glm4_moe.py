"""GLM-4.5 to 4.7: half of each head turns; experts chosen by corrected sigmoids within groups, and
a shared one beside them. The first layers are dense."""

from __future__ import annotations

from jaxllm.models.config.mixture import (
    mixture,
    mixture_names,
    mixture_spec,
    predicting_layers,
    shared_experts,
    shared_names,
    sigmoid_mixtures,
)
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
NAMES = {
    **LLAMA_NAMES,
    **mixture_names(router=("gate.weight", "gate.e_score_correction_bias")),
    **shared_names("mlp.shared_experts"),
}
SIZES = ("n_routed_experts", "moe_intermediate_size")
unused = predicting_layers


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(transformer_spec(hf, partial=True), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    normed = flag(hf, "use_qk_norm")
    mlp = sigmoid_mixtures(parts, sizes, shared_experts(hf))

    def block(layer: int) -> Block:
        norms = None
        if normed:
            norms = parts.qk_norms()
        return parts.block(parts.attention(layer, qkv_bias=bias, qk_norms=norms), mlp(layer))

    return parts.decoder(block)
