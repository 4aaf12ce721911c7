"""Phi-3.5-MoE: layer norms around attention and mixtures of which two experts compute a token, each
weighed against those that are not far below it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.config import ConfigError
from jaxllm.models.config.mixture import expert_split, mixture, mixture_names, mixture_spec
from jaxllm.models.config.read import Config, flag, number
from jaxllm.models.config.rope import rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, one_window, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import Experts, MixtureMLP
from jaxllm.nn.mixture.routers import Router, Routing, unchanged
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rope import LongRope, Rope

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.01,
}
ROUTER = ("gate.weight", "router.weight")  # as published, and newer
NAMES = {
    **LLAMA_NAMES,
    **mixture_names("block_sparse_moe", router=ROUTER, parts=("w1", "w3", "w2")),
    "logits_bias": ("lm_head",),
}
SIZES = ("num_local_experts", "intermediate_size")
REMOTE_CODE = ("modeling_phimoe",)


@dataclass(frozen=True)
class SparseMixer(Routing):
    """The two experts of highest logits, each with its softmax among those near it, of which the
    second does not see the first. They do not add up to 1.

    Attributes:
        near: of a logit's distance below the highest, relative to the larger of the highest and its
            own size.

    See https://arxiv.org/abs/2409.12136.
    """

    near: float = 0.0

    def choose(self, logit_TE: Array, correction_E: Array | None = None) -> tuple[Array, Array]:
        highest_TK, expert_TK = lax.top_k(logit_TE, 2)
        rest_TE = jnp.where(jnp.arange(logit_TE.shape[1]) == expert_TK[:, :1], -jnp.inf, logit_TE)
        weights = (
            self._weight(rows, logit_TE, highest_TK[:, k : k + 1])
            for k, rows in enumerate((logit_TE, rest_TE))
        )
        return expert_TK, jnp.stack([*weights], axis=1)

    def _weight(self, rest_TE: Array, logit_TE: Array, highest_T1: Array) -> Array:
        """The weight `[T]` of the expert with the highest of the logits that are left."""
        size_TE = jnp.maximum(jnp.abs(logit_TE), highest_T1)
        far_TE = (highest_T1 - logit_TE) / size_TE > self.near
        return 1 / jnp.sum(jnp.where(far_TE, 0, jnp.exp(rest_TE - highest_T1)), axis=1)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = mixture_spec(transformer_spec(hf, one_window(hf)), mixture(hf, *SIZES))
    if plain.mixture is None or plain.mixture.choices != 2:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {hf['num_experts_per_tok']}; Phi-3.5-MoE has 2"
        )
    return replace(plain, ropes=tuple(_scaled(rope, hf) for rope in plain.ropes))


def _scaled(rope: Rope, hf: Config) -> Rope:
    """The rotary embedding, whose scaled forms have a factor for each length of sequences."""
    settings = rope_parameters(hf)
    if settings["rope_type"] == "default":
        return rope
    if not isinstance(rope, LongRope):
        raise ConfigError(
            f"config.json: Phi-3.5-MoE has RoPE of type default or longrope, "
            f"not {settings['rope_type']!r:.80}"
        )
    short, long = (number(settings, key) for key in ("short_mscale", "long_mscale"))
    return replace(
        rope, short=replace(rope.short, scale=short), long=replace(rope.long, scale=long)
    )


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init, LayerNorm)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    split = expert_split(spec, shards)
    routing = SparseMixer(
        2, score=unchanged, weigh=unchanged, near=2 * number(hf, "router_jitter_noise")
    )

    def block(layer: int) -> Block:
        mlp = MixtureMLP(
            Router(init, spec.width, sizes.experts, routing),
            Experts.plain(init, sizes.experts, spec.width, sizes.inner, spec.activation, split),
        )
        return parts.block(parts.attention(layer, qkv_bias=bias, out_bias=bias), mlp)

    return parts.decoder(block, head_bias=flag(hf, "lm_head_bias"))
