"""Granite-MoE: Granite's multipliers around mixtures of experts, whose tensors are fused."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.models.config.mixture import mixture, mixture_spec, routed
from jaxllm.models.config.read import Config, flag, number
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block, ScaledBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import ScaledEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Scale
from jaxllm.nn.mixture.routers import softmax, unchanged
from jaxllm.nn.mlp import FeedForward

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTURE = "model.layers.{}.block_sparse_moe"
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.mlp.router": (f"{MIXTURE}.router.layer.weight", f"{MIXTURE}.router.weight"),
    "layers.{}.mlp.experts.gate_up": (
        f"{MIXTURE}.input_linear.weight",
        f"{MIXTURE}.experts.gate_up_proj",
    ),
    "layers.{}.mlp.experts.down": (
        f"{MIXTURE}.output_linear.weight",
        f"{MIXTURE}.experts.down_proj",
    ),
}
SIZES = ("num_local_experts", "intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return mixture_spec(transformer_spec(hf), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    return granite(Parts(spec, shards, init))


def granite(parts: Parts, shared: Callable[[], FeedForward | None] = lambda: None) -> Decoder:
    """The model of these parts; `shared` makes what is beside a layer's experts."""
    spec = parts.spec
    hf = parts.spec.config
    sizes = mixture(parts.spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    scale = number(hf, "attention_multiplier")

    def mlp() -> FeedForward:
        init = parts.init
        shards = parts.shards
        return routed(spec, shards, init, sizes, shared(), score=unchanged, weigh=softmax)

    def block(layer: int) -> Block:
        return ScaledBlock(
            attention_norm=parts.norm(),
            attention=parts.attention(layer, scale=scale, qkv_bias=bias, out_bias=bias),
            mlp_norm=parts.norm(),
            mlp=mlp(),
            factor=number(hf, "residual_multiplier"),
        )

    factor = number(hf, "embedding_multiplier")
    return parts.decoder(
        block,
        embed=ScaledEmbedding(parts.init, spec.vocab_size, spec.width, parts.table_axis, factor),
        logits_maps=(Scale(1 / number(hf, "logits_scaling")),),
    )
