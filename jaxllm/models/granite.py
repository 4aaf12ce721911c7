"""Granite: Llama with multipliers of embeddings, scores, residual sums and logits."""

from __future__ import annotations

from jaxllm.models.config.read import Config, flag, number
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block, ScaledBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import ScaledEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.logits import Scale

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
NAMES = LLAMA_NAMES
spec = transformer_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    hf = spec.config
    bias = flag(hf, "attention_bias")
    mlp_bias = flag(hf, "mlp_bias")
    scale = number(hf, "attention_multiplier")
    residual = number(hf, "residual_multiplier")

    def block(layer: int) -> Block:
        return ScaledBlock(
            attention_norm=parts.norm(),
            attention=parts.attention(layer, scale=scale, qkv_bias=bias, out_bias=bias),
            mlp_norm=parts.norm(),
            mlp=parts.gated_mlp(mlp_bias),
            factor=residual,
        )

    factor = number(hf, "embedding_multiplier")
    return parts.decoder(
        block,
        embed=ScaledEmbedding(init, spec.vocab_size, spec.width, parts.table_axis, factor),
        logits_maps=(Scale(1 / number(hf, "logits_scaling")),),
    )
