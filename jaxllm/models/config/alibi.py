"""ALiBi in place of rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.rope import Alibi, alibi_slopes


def with_alibi(spec: ModelSpec, alibi: type[Alibi] = Alibi, scale: float = 1.0) -> ModelSpec:
    """The spec with scores that grow with the key's position, for `head_maps.BiasedKeys`.

    Args:
        alibi: the rope that makes of a position what scores of its key get.
        scale: that scores are multiplied by before they get it; 1 where the sum is multiplied.

    Raises ConfigError where query heads share key heads: a key holds what one query head adds.
    """
    heads = spec.heads(1)
    layers = len(spec.layers)
    if heads.kv != heads.query:
        raise ConfigError(
            f"config.json: alibi is true with {heads.query} query heads over {heads.kv} key heads; "
            "ALiBi runs where each query head has a key head of its own"
        )
    slopes = tuple(slope / scale for slope in alibi_slopes(heads.query))
    rope = alibi(-(-heads.dim // 2), slopes)
    width = heads.dim + heads.dim % 2 + 2  # two numbers more
    caches = tuple(
        layer.stored_at(width).unrounded("keys hold positions (ALiBi), which 8 bits would round")
        for layer in spec.layers
    )
    return replace(spec, ropes=(rope,) * layers, layers=caches)
