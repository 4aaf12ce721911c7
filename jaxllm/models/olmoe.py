"""OLMoE: mixtures of experts; one norm over all query heads, one over all key heads, and queries,
keys and values that may be clipped behind them."""

from __future__ import annotations

from jax import Array

from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed
from jaxllm.models.config.read import Config, flag, optional
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import Clipped, NormedHeads, WholeRMSNorm
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import normalised, unchanged
from jaxllm.nn.rope import Rotation

SPELLING = {"num_local_experts": "num_experts"}  # transformers reads either
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
NAMES = {
    **LLAMA_NAMES,
    **mixture_names(),
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_norm",),
}
SIZES = ("num_experts", "intermediate_size")


class ClippedNorms(NormedHeads):
    """Norms of queries and of keys, then everything clipped."""

    def __init__(self, parts: Parts, limit: float):
        super().__init__(parts.init, parts.heads, parts.spec.norm_eps, WholeRMSNorm)
        self.clip = Clipped(limit)

    def __call__(
        self, row_TXCH: Array, queries: int, rotation: Rotation, context: RowContext
    ) -> tuple[Array, Rotation]:
        normed_TXCH, rotation = super().__call__(row_TXCH, queries, rotation, context)
        return self.clip(normed_TXCH, queries, rotation, context)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(transformer_spec(hf), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    limit = optional(hf, "clip_qkv")
    if flag(hf, "norm_topk_prob"):
        weigh = normalised
    else:
        weigh = unchanged

    def norms() -> NormedHeads:
        if limit is not None:
            return ClippedNorms(parts, limit)
        return NormedHeads(init, parts.heads, spec.norm_eps, WholeRMSNorm)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms())
        return parts.block(attention, routed(spec, shards, init, sizes, weigh=weigh))

    return parts.decoder(block)
