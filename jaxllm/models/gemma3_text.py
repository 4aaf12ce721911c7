"""Gemma 3: Gemma 2 with norms of query and key heads in place of capped scores. Five layers with a
window turn by one base, every sixth layer sees all and turns by another. EmbeddingGemma, too."""

from __future__ import annotations

from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models import gemma2
from jaxllm.models.config.read import Config, flag, positive, settings_of
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, Parts, typed
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import OffsetRMSNorm

DEFAULTS: Config = {
    **gemma2.DEFAULTS,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
NAMES = gemma2.NAMES
THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def read(hf: Config) -> dict[str, Any]:
    """The configuration where EmbeddingGemma's tokens, which see those behind them, have the common
    key for it, and its windows, which reach to both sides, their half."""
    config = dict(hf)
    if flag(hf, "use_bidirectional_attention"):
        window = positive({**DEFAULTS, **hf}, "sliding_window") // 2
        config |= {
            "use_bidirectional_attention": None,
            "is_causal": False,
            "sliding_window": window,
        }
    return config


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    every = positive({"sliding_window_pattern": 6, **hf}, "sliding_window_pattern")
    hf = typed(hf, lambda layer: SLIDING if (layer + 1) % every else FULL)
    # Configurations may have the key, but no score of Gemma 3 is capped
    unread = {"rope_scaling": None, "attn_logit_softcapping": None}
    return gemma2.spec({**hf, "rope_parameters": _ropes(hf), **unread})


def _ropes(hf: Config) -> dict[str, Config]:
    """RoPE settings of each layer type, as transformers reads them: a type without settings turns
    by its usual base, and older keys give what `rope_parameters` leaves open. Raises ConfigError
    for settings of no layer type, which transformers reads past."""
    settings = settings_of(hf, "rope_parameters")
    if settings and THETA.keys().isdisjoint(settings):
        raise ConfigError(
            f"config.json: rope_parameters is {settings!r:.200}; it must have an object for "
            f"{FULL} or {SLIDING}, or both"
        )
    bases = {FULL: hf.get("rope_theta"), SLIDING: hf.get("rope_local_base_freq")}
    older = {FULL: settings_of(hf, "rope_scaling"), SLIDING: {}}
    return {
        layer_type: {
            "rope_theta": usual if bases[layer_type] is None else bases[layer_type],
            **settings_of(settings, layer_type),
            **older[layer_type],
        }
        for layer_type, usual in THETA.items()
    }


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    return gemma2.gemma(Parts(spec, shards, init, OffsetRMSNorm), qk_norm=True)
