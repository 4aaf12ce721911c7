"""VaultGemma: Gemma 2 without norms behind its parts."""

from __future__ import annotations

from jaxllm.models import gemma2
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import OffsetRMSNorm

DEFAULTS = gemma2.DEFAULTS
spec = gemma2.spec
NAMES = {**LLAMA_NAMES, "layers.{}.mlp_norm": ("model.layers.{}.pre_feedforward_layernorm",)}


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, OffsetRMSNorm)

    def block(layer: int) -> Block:
        return parts.block(gemma2.attention(parts, layer), parts.gated_mlp())

    return gemma2.decoder(parts, block)
