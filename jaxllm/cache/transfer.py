"""Pages between the pool and arrays of their own, a few in one program for all layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

type Page = tuple[Array, ...]  # one page of every layer: an array [arrays of one shape, *that shape] for each shape in the pool


def take(pool: Any, page_N: Array) -> tuple[Any, tuple[Page, ...]]:
    """The pool as it was, which must be donated, and N pages of it. Numbers beyond the pool give any page."""
    leaves = jax.tree.leaves(pool)
    stacks = [jnp.stack([leaves[i].at[page_N].get(mode="clip") for i in group], axis=1) for group in _groups(leaves)]
    return pool, tuple(tuple(stack[n] for stack in stacks) for n in range(page_N.shape[0]))


def put(pool: Any, page_N: Array, pages: tuple[Page, ...]) -> tuple[Any, Array]:
    """The pool, which must be donated, with N pages written, and a value that is there when they are. Numbers must differ; those beyond the
    pool are dropped."""
    leaves, treedef = jax.tree.flatten(pool)
    for at, group in enumerate(_groups(leaves)):
        for place, i in enumerate(group):
            rows = jnp.stack([page[at][place] for page in pages])
            leaves[i] = leaves[i].at[page_N].set(rows, mode="drop", unique_indices=True)
    return jax.tree.unflatten(treedef, leaves), page_N[:1] + 0


def page_shapes(pool: Any, memory_kind: str | None = None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and sharding of one page of an abstract pool, in the memory of that kind."""
    leaves = jax.tree.leaves(pool)
    found = []
    for group in _groups(leaves):
        leaf = leaves[group[0]]
        spec = PartitionSpec(None, *leaf.sharding.spec[1:])
        sharding = NamedSharding(leaf.sharding.mesh, spec, memory_kind=memory_kind)
        found.append(jax.ShapeDtypeStruct((len(group), *leaf.shape[1:]), leaf.dtype, sharding=sharding))
    return tuple(found)


def _groups(leaves: list[Any]) -> list[list[int]]:
    """Leaves whose pages have the same shape and type."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault((leaf.shape[1:], leaf.dtype), []).append(i)
    return list(found.values())
