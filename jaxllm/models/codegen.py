"""CodeGen: GPT-J whose queries, values and keys are one tensor, in four blocks."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models import gptj
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.gptj import DEFAULTS as DEFAULTS
from jaxllm.models.gptj import SPELLING as SPELLING
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.rules import Layout

NAMES = {**gptj.NAMES, "layers.{}.attention.qkv": ("transformer.h.{}.attn.qkv_proj",)}
IGNORED = ("transformer.h.{}.attn.causal_mask",)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if (width := positive(hf, "hidden_size")) % 4:
        raise ConfigError(
            f"config.json: hidden_size is {width}; it must be a multiple of 4, the blocks of "
            "queries, values and keys"
        )
    return gptj.spec(hf)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    model = gptj.build(spec, shards, init)
    for layer in model.layers:
        layer.attention.qkv.layout = Layout.FOUR_BLOCKS
    return model
