"""DBRX: layer norms without biases, clipped queries, keys and values in one tensor, and mixtures
whose experts lie below each other in one tensor for each of their maps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models.config.mixture import expert_split, mixture, mixture_spec
from jaxllm.models.config.read import Config, optional, settings_of
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import Clipped
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import ExpertMaps, Experts, MixtureMLP, Tensors, leaf_of
from jaxllm.nn.mixture.routers import Router, Routing, normalised, unchanged
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Part, Piece, Transposed

SPELLING = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "kv_n_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "moe_num_experts": "num_experts",
}
DEFAULTS: Config = {"max_position_embeddings": 2048, "num_key_value_heads": 1}
# What the settings of the feed-forward may leave out
FEED_FORWARD: Config = {
    "intermediate_size": 3584,
    "num_experts": 4,
    "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
}
BLOCK = "transformer.blocks.{}"
NAMES: Mapping[str, tuple[str, ...]] = {
    "embed": ("transformer.wte",),
    "norm": ("transformer.norm_f",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": (f"{BLOCK}.norm_attn_norm.norm_1",),
    "layers.{}.attention.qkv": (f"{BLOCK}.norm_attn_norm.attn.Wqkv",),
    "layers.{}.attention.out": (f"{BLOCK}.norm_attn_norm.attn.out_proj",),
    "layers.{}.mlp_norm": (f"{BLOCK}.norm_attn_norm.norm_2",),
    "layers.{}.mlp.router": (f"{BLOCK}.ffn.router.layer.weight",),
    "layers.{}.mlp.experts.gate_up": (
        f"{BLOCK}.ffn.experts.mlp.w1",
        f"{BLOCK}.ffn.experts.mlp.v1",
    ),
    "layers.{}.mlp.experts.down": (f"{BLOCK}.ffn.experts.mlp.w2",),
}
REMOTE_CODE = ("modeling_dbrx",)
SIZES = ("num_experts", "intermediate_size", "moe_top_k")


@dataclass(frozen=True)
class Stacked(Tensors):
    """A tensor for each part of a map, in which experts lie below each other; `w2` transposed."""

    def __call__(self, leaf: str, columns: int | None = None) -> tuple[Piece, ...]:
        experts, out, inp = self.maps.shape
        if self.maps.parts == 1:
            name = leaf_of(self.names[0], leaf)
            shape = (experts, inp, out)
            steps = (Part(shape, 1, 0, inp), Transposed())
            return (Piece(name, (experts * inp, out), (experts, out, inp), steps=steps),)
        part = out // self.maps.parts
        return tuple(
            Piece(
                leaf_of(self.names[block.start // part], leaf),
                (experts * part, inp),
                (experts, len(block), inp),
                start=index * len(block),
                steps=(Part((experts, part, inp), 1, first, first + len(block)),),
            )
            for index, block in enumerate(self.maps.blocks)
            for first in (block.start % part,)
        )


class StackedMaps(ExpertMaps):
    """A map of every expert, of `Stacked` tensors."""

    def forms(self, *names: str) -> list[Tensors]:
        return [Stacked(self, names, fused=True)]


def read(hf: Config) -> dict[str, Any]:
    """The configuration with settings of its parts beside the others."""
    attention = settings_of(hf, "attn_config")
    experts = settings_of(hf, "ffn_config")
    outer = {key: v for key, v in hf.items() if key not in ("attn_config", "ffn_config")}
    return {**attention, **experts, **outer}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    hf = {**FEED_FORWARD, **hf}
    if (norm := hf["moe_normalize_expert_weights"]) not in (None, 1):
        raise ConfigError(
            f"config.json: moe_normalize_expert_weights is {norm!r:.80}; it must be 1 or null"
        )
    act = settings_of(hf, "ffn_act_fn").get("name", "silu")
    fixed = {"rms_norm_eps": 1e-5, "head_dim": None, "hidden_act": act}
    return mixture_spec(transformer_spec({**hf, **fixed}), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, functools.partial(LayerNorm, bias=False))
    hf = spec.config
    sizes = mixture(hf, *SIZES)
    split = expert_split(spec, shards)
    limit = optional(hf, "clip_qkv")
    if hf.get("moe_normalize_expert_weights") is None:
        weigh = unchanged
    else:
        weigh = normalised

    def block(layer: int) -> Block:
        experts = Experts.plain(
            init, sizes.experts, spec.width, sizes.inner, spec.activation, split, maps=StackedMaps
        )
        router = Router(init, spec.width, sizes.experts, Routing(sizes.choices, weigh=weigh))
        attention = parts.attention(layer, head_map=None if limit is None else Clipped(limit))
        return parts.block(attention, MixtureMLP(router, experts))

    return parts.decoder(block)
