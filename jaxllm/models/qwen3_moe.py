"""Qwen3-MoE: Qwen3 with mixtures of experts; some layers may stay dense, all may have a window."""

from __future__ import annotations

from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed, sparse_layers
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import normalised, unchanged
from jaxllm.nn.mlp import FeedForward, GatedMLP

SPELLING = {"num_local_experts": "num_experts"}  # as transformers writes it since version 5
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}
NAMES = {**LLAMA_NAMES, **mixture_names()}
SIZES = ("num_experts", "moe_intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    wanted = flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    window = None
    if wanted:
        window = positive(hf, "sliding_window")
    return mixture_spec(transformer_spec(hf, lambda layer: window), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    sparse = sparse_layers(hf)
    if flag(hf, "norm_topk_prob"):
        weigh = normalised
    else:
        weigh = unchanged

    def mlp(layer: int) -> FeedForward:
        if layer in sparse:
            return routed(spec, shards, init, sizes, weigh=weigh)
        inner = positive(hf, "intermediate_size")
        return GatedMLP(init, spec.width, inner, shards, spec.activation)

    def block(layer: int) -> Block:
        norms = parts.qk_norms()
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, qk_norms=norms)
        return parts.block(attention, mlp(layer))

    return parts.decoder(block)
