"""dots.llm1: Qwen 3's attention; experts chosen by corrected sigmoids in groups, and shared ones
beside them. The first layers are dense."""

from __future__ import annotations

from jaxllm.models.config.mixture import (
    mixture,
    mixture_names,
    mixture_spec,
    shared_experts,
    shared_names,
    sigmoid_mixtures,
)
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    FULL,
    LLAMA_NAMES,
    SLIDING,
    Parts,
    transformer_spec,
    type_window,
    typed,
    window_start,
)
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
NAMES = {
    **LLAMA_NAMES,
    **mixture_names(router=("gate.weight", "gate.e_score_correction_bias")),
    **shared_names("mlp.shared_experts"),
}
REMOTE_CODE = ("modeling_dots1",)
SIZES = ("n_routed_experts", "moe_intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    windows = hf.get("sliding_window") is not None
    first = window_start(hf)
    hf = typed(hf, lambda layer: SLIDING if windows and layer >= first else FULL)
    return mixture_spec(transformer_spec(hf, type_window(hf)), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    mlp = sigmoid_mixtures(parts, sizes, shared_experts(hf))

    def block(layer: int) -> Block:
        norms = parts.qk_norms()
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, qk_norms=norms)
        return parts.block(attention, mlp(layer))

    return parts.decoder(block)
