"""FlexOlmo: OLMo 2's attention and norms after each part, around mixtures of experts."""

from __future__ import annotations

from jaxllm.models import olmo2
from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block, PostNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import NormedHeads, WholeRMSNorm
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import normalised, unchanged

SPELLING = {"num_local_experts": "num_experts"}  # transformers reads either
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "num_experts": 7,
    "num_experts_per_tok": 5,
}
NAMES = {**olmo2.NAMES, **mixture_names()}
SIZES = ("num_experts", "intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(transformer_spec(hf), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    if flag(hf, "norm_topk_prob"):
        weigh = normalised
    else:
        weigh = unchanged

    def block(layer: int) -> Block:
        norms = NormedHeads(init, parts.heads, spec.norm_eps, WholeRMSNorm)
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, head_map=norms)
        mlp = routed(spec, shards, init, sizes, weigh=weigh)
        return parts.block(attention, mlp, PostNormBlock)

    return parts.decoder(block)
