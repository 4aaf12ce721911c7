"""Copies pages between the pool and arrays of their own, a few pages of all layers per program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache.arrays import KVCache, PagedArrays

# One page of every layer: an array [arrays of one shape, *that shape] for each shape in the pool
type Page = tuple[Array, ...]


def take(pool: KVCache, page_N: Array) -> tuple[KVCache, tuple[Page, ...]]:
    """The unchanged pool, which must be donated, and N pages of it. Numbers beyond the pool give
    any page."""
    arrays = _only_group(pool)
    leaves = jax.tree.leaves(arrays)
    rows_LN = arrays.page_rows(page_N)
    stacks = [
        jnp.concatenate([leaves[i].at[rows_LN].get(mode="clip") for i in alike])
        for alike in _leaves_alike(arrays)
    ]
    return pool, tuple(tuple(stack[:, n] for stack in stacks) for n in range(page_N.shape[0]))


def put(pool: KVCache, page_N: Array, pages: tuple[Page, ...]) -> tuple[KVCache, Array]:
    """The pool, which must be donated, with N pages written, and a value that is ready when they
    are. Numbers must differ; those beyond the pool are dropped."""
    arrays = _only_group(pool)
    leaves, treedef = jax.tree.flatten(pool)
    rows_LN = arrays.page_rows(page_N)
    for number, alike in enumerate(_leaves_alike(arrays)):
        parts = jnp.split(jnp.stack([page[number] for page in pages], axis=1), len(alike))
        for i, part in zip(alike, parts, strict=True):
            leaves[i] = leaves[i].at[rows_LN].set(part, mode="drop", unique_indices=True)
    return jax.tree.unflatten(treedef, leaves), page_N[:1] + 0


def page_shapes(pool: KVCache, memory_kind: str | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and shardings of one page of an abstract pool, in memory of that kind."""
    arrays = _only_group(pool)
    leaves = jax.tree.leaves(arrays)
    shapes = []
    for alike in _leaves_alike(arrays):
        leaf = leaves[alike[0]]
        spec = PartitionSpec(None, *leaf.sharding.spec[1:])
        sharding = NamedSharding(leaf.sharding.mesh, spec, memory_kind=memory_kind)
        shape = (len(alike) * arrays.layers, *leaf.shape[1:])
        shapes.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding))
    return tuple(shapes)


def _only_group(pool: KVCache) -> PagedArrays:
    """The pages of a cache that can leave the device: of one group."""
    (arrays,) = pool
    assert isinstance(arrays, PagedArrays), "states have no pages"
    return arrays


def _leaves_alike(arrays: PagedArrays) -> list[list[int]]:
    """Numbers of the leaves whose pages have the same shape and type, which travel as one array."""
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(jax.tree.leaves(arrays)):
        alike.setdefault((leaf.shape[1:], leaf.dtype), []).append(i)
    return list(alike.values())
