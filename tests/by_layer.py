"""A pool's arrays layer by layer."""

from __future__ import annotations

from jax import Array

from jaxllm.cache.kv import KVCache


def by_layer(kv: KVCache) -> list[Array]:
    """Every leaf as `[L, P, ...]`."""
    parts = [part for part in (kv.k, kv.v, kv.scales) if part]
    return [
        leaf.reshape(kv.groups.count(kind), -1, *leaf.shape[1:])
        for part in parts
        for kind, leaf in enumerate(part)
    ]
