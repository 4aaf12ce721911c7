"""MiniMax-M2: experts chosen by corrected sigmoids; one norm over all query heads, one over all key
heads; half of each head turns. The published weights are of 8 bits."""

from __future__ import annotations

import jax

from jaxllm.config import ConfigError
from jaxllm.models.config.mixture import mixture, mixture_names, mixture_spec, routed
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import NormedHeads, WholeRMSNorm
from jaxllm.nn.linear import Init

SPELLING = {"num_experts": "num_local_experts"}  # transformers reads either
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5000000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
ROUTER = ("gate.weight", "e_score_correction_bias")
NAMES = {
    **LLAMA_NAMES,
    **mixture_names("block_sparse_moe", router=ROUTER, parts=("w1", "w3", "w2")),
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_norm",),
}
REMOTE_CODE = ("modeling_minimax_m2",)
SIZES = ("num_local_experts", "intermediate_size")


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration; `rotary_dim` says how much of a head turns. Raises
    ConfigError."""
    if hf.get("scoring_func", "sigmoid") != "sigmoid":
        raise ConfigError(
            f"config.json: scoring_func is {hf['scoring_func']!r:.80}; minimax_m2 models have "
            "'sigmoid'"
        )
    config = dict(hf)
    if hf.get("rotary_dim") is not None:
        share = positive(hf, "rotary_dim") / positive(hf, "head_dim")
        config.setdefault("partial_rotary_factor", share)
    return mixture_spec(transformer_spec(config, partial=True), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)

    def block(layer: int) -> Block:
        norms = NormedHeads(init, parts.heads, spec.norm_eps, WholeRMSNorm)
        mlp = routed(spec, shards, init, sizes, score=jax.nn.sigmoid, corrected=True)
        return parts.block(parts.attention(layer, head_map=norms), mlp)

    return parts.decoder(block)
