"""Qwen2-MoE: Qwen2 with mixtures of experts, beside which a gated expert computes every token."""

from __future__ import annotations

from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed, sparse_layers
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    LLAMA_NAMES,
    Parts,
    layer_window,
    transformer_spec,
    window_start,
)
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import SharedExpert
from jaxllm.nn.mixture.routers import normalised, unchanged
from jaxllm.nn.mlp import FeedForward, GatedMLP

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
}
SHARED = "model.layers.{}.mlp.shared_expert"
NAMES = {
    **LLAMA_NAMES,
    **mixture_names(),
    "layers.{}.mlp.shared.gate": (f"{SHARED}_gate",),
    "layers.{}.mlp.shared.mlp.gate_up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "layers.{}.mlp.shared.mlp.down": (f"{SHARED}.down_proj",),
}
SIZES = ("num_experts", "moe_intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration; windows slide on even layers below
    `max_window_layers`. Raises ConfigError."""
    config = dict(hf)
    types = hf.get("layer_types")
    if types is None:
        slides = flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
        first = 0
        if slides:
            first = window_start(hf)
        types = ["full_attention"] * positive(hf, "num_hidden_layers")
        for layer in range(0, min(first, len(types)), 2):
            types[layer] = "sliding_attention"
        config["layer_types"] = types
    return mixture_spec(transformer_spec(hf, layer_window(config)), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "qkv_bias")
    sparse = sparse_layers(hf)
    if flag(hf, "norm_topk_prob"):
        weigh = normalised
    else:
        weigh = unchanged

    def dense(inner: str) -> GatedMLP:
        return GatedMLP(init, spec.width, positive(hf, inner), shards, spec.activation)

    def mlp(layer: int) -> FeedForward:
        if layer not in sparse:
            return dense("intermediate_size")
        shared = SharedExpert(init, dense("shared_expert_intermediate_size"), spec.width)
        return routed(spec, shards, init, sizes, shared, weigh=weigh)

    def block(layer: int) -> Block:
        return parts.block(parts.attention(layer, qkv_bias=bias), mlp(layer))

    return parts.decoder(block)
