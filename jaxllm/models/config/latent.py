"""What families with multi-head latent attention share: the spec of their configuration, their
attention and mixtures, and the tensor names that DeepSeek-V2 introduced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxllm.cache.layer import LatentKV
from jaxllm.config import ConfigError
from jaxllm.models.config.mixture import (
    dense_layers,
    mixture,
    mixture_names,
    mixture_spec,
    routed,
    shared_experts,
    shared_names,
)
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.rope import rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    LLAMA_NAMES,
    MAX_HEAD_DIM,
    Parts,
    transformer_spec,
)
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.latent import LatentAttention, LatentHeads
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import FeedForward, GatedMLP

INNER_EPS = 1e-6  # of the norms inside attention, whatever `rms_norm_eps` says
SIZES = ("n_routed_experts", "moe_intermediate_size")
_ATTENTION = "model.layers.{}.self_attn"
_OWN = "layers.{}.attention"


def latent_names(router: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """Module of the decoder → checkpoint tensors; `router` are those of a layer's router."""
    replaced = [f"{_OWN}.{name}" for name in ("qkv", "q_norm", "k_norm")]
    kept = {path: names for path, names in LLAMA_NAMES.items() if path not in replaced}
    return {
        **kept,
        f"{_OWN}.query": (f"{_ATTENTION}.q_proj",),
        f"{_OWN}.query.down": (f"{_ATTENTION}.q_a_proj",),
        f"{_OWN}.query.norm": (f"{_ATTENTION}.q_a_layernorm",),
        f"{_OWN}.query.up": (f"{_ATTENTION}.q_b_proj",),
        f"{_OWN}.entry": (f"{_ATTENTION}.kv_a_proj_with_mqa",),
        f"{_OWN}.entry_norm": (f"{_ATTENTION}.kv_a_layernorm",),
        f"{_OWN}.key": (f"{_ATTENTION}.kv_b_proj",),
        f"{_OWN}.value": (f"{_ATTENTION}.kv_b_proj",),
        **mixture_names(router=router),
        **shared_names("mlp.shared_experts"),
    }


def latent_spec(hf: Config, **router: str) -> ModelSpec:
    """The spec of a complete configuration; `router` are keys that say how experts are chosen, with
    what the family does. Raises ConfigError for another value of them."""
    for key, only in ({"moe_layer_freq": 1} | router).items():
        if hf.get(key) not in (None, only):
            raise ConfigError(
                f"config.json: {key} is {hf[key]!r:.80}; {hf['model_type']} models have {only!r}"
            )
    for key in ("kv_lora_rank", "qk_nope_head_dim"):
        if positive(hf, key) > MAX_HEAD_DIM:  # the order of so many entries is listed
            raise ConfigError(
                f"config.json: {key} is {hf[key]}; at most {MAX_HEAD_DIM} is supported"
            )
    rank = positive(hf, "kv_lora_rank")
    rope = positive(hf, "qk_rope_head_dim")
    spec = transformer_spec({**hf, "head_dim": rope})
    # Of a token, for absorbed queries and expanded keys and values. Compiled for an H200, a step of
    # 8,192 tokens holds 1,670 numbers a head with 16 heads, 1,729 with 128; 1,760 are counted.
    products = spec.query_heads * (3 * (rank + rope) + 32)
    spec = replace(
        spec,
        layers=(LatentKV(rank, rope),) * len(spec.layers),
        inner_width=max(spec.inner_width, products),
    )
    return mixture_spec(spec, mixture(hf, *SIZES))


def latent_decoder(
    spec: ModelSpec, shards: int, init: Init, paired: bool, **routing: Any
) -> Decoder:
    """The model with fresh parameters; `routing` are fields of `nn.routers.Routing`. Raises
    ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(hf, *SIZES)
    dense = dense_layers(hf)

    def gated(inner: int) -> GatedMLP:
        return GatedMLP(init, spec.width, inner, shards, spec.activation, flag(hf, "mlp_bias"))

    def mlp(layer: int) -> FeedForward:
        if layer in dense:
            return gated(positive(hf, "intermediate_size"))
        shared = shared_experts(hf)
        beside = None
        if shared:
            beside = gated(sizes.inner * shared)
        return routed(spec, shards, init, sizes, beside, **routing)

    def block(layer: int) -> Block:
        return parts.block(_attention(spec, init, paired), mlp(layer))

    return parts.decoder(block)


def _attention(spec: ModelSpec, init: Init, paired: bool) -> LatentAttention:
    hf = spec.config
    heads = LatentHeads(
        heads=spec.query_heads,
        rank=positive(hf, "kv_lora_rank"),
        plain=positive(hf, "qk_nope_head_dim"),
        rope=positive(hf, "qk_rope_head_dim"),
        value=positive(hf, "v_head_dim"),
        paired=paired,
    )
    query_rank = None
    if hf.get("q_lora_rank") is not None:
        query_rank = positive(hf, "q_lora_rank")
    return LatentAttention(
        init,
        heads,
        spec.width,
        scale=_scale(hf, heads.plain + heads.rope),
        eps=INNER_EPS,
        query_rank=query_rank,
        bias=flag(hf, "attention_bias"),
    )


def _scale(hf: Config, dim: int) -> float:
    """Factor of scores: scaled RoPE's `mscale_all_dim` makes them grow by its square."""
    settings = rope_parameters(hf)
    if settings["rope_type"] == "default" or not settings.get("mscale_all_dim"):
        return dim**-0.5
    factor = number(settings, "factor")
    weight = number(settings, "mscale_all_dim")
    growth = 1.0
    if factor > 1:
        growth = 0.1 * weight * math.log(factor) + 1
    return dim**-0.5 * growth**2
