"""Caches of one group for tests, and their arrays layer by layer."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.cache.arrays import KVCache, PagedArrays
from jaxllm.cache.groups import Place
from jaxllm.cache.layer import PagedKV


def abstract_kv(
    layers: int, pages: int, heads: int, page_size: int, dim: int, dtype: DTypeLike, mesh: Mesh
) -> KVCache:
    """Keys and values of one group, as shapes with shardings."""
    spec = PagedKV(heads, dim, dim)
    return (PagedArrays.abstract(spec, layers, pages, page_size, dtype, mesh),)


def places(layers: int) -> list[Place]:
    """Of the layers of one group."""
    return [Place(0, layer) for layer in range(layers)]


def by_layer(kv: KVCache) -> list[Array]:
    """Every leaf as `[L, P, ...]`: keys of all groups, then values, then scales."""
    kinds = zip(*((*arrays.planes, *arrays.scales) for arrays in kv), strict=True)
    return [
        leaf.reshape(arrays.layers, -1, *leaf.shape[1:])
        for leaves in kinds
        for arrays, leaf in zip(kv, leaves, strict=True)
    ]


def spoiled(kv: KVCache, plane: int, page: int) -> KVCache:
    """The cache with no numbers in the first layer's page of the first group's keys (plane 0) or
    values (1)."""
    first, *others = kv
    planes = list(first.planes)
    planes[plane] = planes[plane].at[page].set(jnp.nan)
    return (replace(first, planes=tuple(planes)), *others)
