"""KV pages within the pool, out of it on their way to host memory, and back into it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.arrays import DROP_PAGE, KVCache, PagedArrays, page_counts
from jaxllm.cache.transfer import Page, page_shapes, put, take
from jaxllm.engine.runtime.program import (
    KV,
    Key,
    Program,
    Sizes,
    Variant,
    generates,
    in_flight,
    shardings,
)
from jaxllm.engine.runtime.shapes import StepShapes

# Layers whose pages are copied together: all of a large model's would need more memory than a
# small step
LAYERS_AT_ONCE = 8


def copy_pages(kv: KVCache, buffer: Array, *, local: NamedSharding) -> KVCache:
    """Copy pages of every layer, all sources before any target is written.

    `buffer` holds, for each cache group, n sources and then n targets. A pair with target
    `DROP_PAGE` does nothing.
    """
    pairs = jax.device_put(buffer, local).reshape(len(page_counts(kv)), 2, -1)
    return tuple(
        _copied(arrays, pairs, group) if isinstance(arrays, PagedArrays) else arrays
        for group, arrays in enumerate(kv)
    )


def _copied(arrays: PagedArrays, pairs: Array, group: int) -> PagedArrays:
    """The pages of a group, with those copied that `pairs[group]` names: sources, then targets."""

    def copied(pages: Array) -> Array:
        source, target = (arrays.page_rows(page_N) for page_N in pairs[group])
        for start in range(0, len(source), LAYERS_AT_ONCE):
            some = slice(start, start + LAYERS_AT_ONCE)
            pages = pages.at[target[some]].set(pages[source[some]], mode="drop")
        return pages

    return arrays.map(copied)


def pack_copies(
    copies: Sequence[tuple[int, int, int]], shapes: StepShapes
) -> list[tuple[Key, np.ndarray]]:
    """Calls that copy pages in order, (source, target, cache group) each. What is left of a call
    copies to `DROP_PAGE`."""
    sizes = shapes.buckets.copies
    calls = []
    of_group = [
        [pair[:2] for pair in copies if pair[2] == group] for group in range(shapes.num_groups)
    ]
    for start in range(0, max(map(len, of_group)), sizes[-1]):
        batches = [pairs[start : start + sizes[-1]] for pairs in of_group]
        size = next(n for n in sizes if n >= max(map(len, batches)))
        rows = np.zeros((shapes.num_groups, 2, size), np.int32)
        rows[:, 1] = DROP_PAGE
        for row, batch in zip(rows, batches, strict=True):
            row[:, : len(batch)] = np.array(batch, np.int32).reshape(-1, 2).T
        calls.append((Key("copy_pages", (size,)), rows.reshape(-1)))
    return calls


def _build_copy(shapes: StepShapes, pairs: int) -> Variant:
    return Variant(
        functools.partial(copy_pages, local=shapes.replicated),
        takes=(KV, shapes.host_buffer(2 * pairs * shapes.num_groups)),
        gives=(KV,),
    )


def _copy_buffers(shapes: StepShapes) -> int:
    """A step copies at most one page a slot."""
    return -(-shapes.slots // shapes.buckets.copies[-1]) * (in_flight(shapes) + 2)


def save_pages(
    kv: KVCache, buffer: Array, *, local: NamedSharding
) -> tuple[KVCache, tuple[Page, ...]]:
    """(the pool, the pages that `buffer` numbers as arrays of their own)."""
    return take(kv, jax.device_put(buffer, local))


def load_pages(
    kv: KVCache, buffer: Array, pages: tuple[Page, ...], *, local: NamedSharding
) -> tuple[KVCache, Array]:
    """(the pool with `pages` at the numbers of `buffer`, a value that is there when they are)."""
    return put(kv, jax.device_put(buffer, local), pages)


def _build_save(shapes: StepShapes, pages: int) -> Variant:
    return Variant(
        functools.partial(save_pages, local=shapes.replicated),
        takes=(KV, shapes.host_buffer(pages)),
        gives=(KV, (shardings(page_shapes(shapes.kv)),) * pages),
    )


def _build_load(shapes: StepShapes, pages: int) -> Variant:
    return Variant(
        functools.partial(load_pages, local=shapes.replicated),
        takes=(KV, shapes.host_buffer(pages), (page_shapes(shapes.kv),) * pages),
        gives=(KV, shapes.replicated),
    )


def _sizes(shapes: StepShapes) -> list[Sizes]:
    return [(shapes.moved_pages,)] if shapes.moved_pages else []


COPY_PAGES = Program(
    "copy_pages",
    sizes=lambda shapes: [(pairs,) for pairs in shapes.buckets.copies],
    build=_build_copy,
    buffers=_copy_buffers,
    runs=generates,
)
SAVE_PAGES = Program("save_pages", _sizes, _build_save, runs=generates)
LOAD_PAGES = Program("load_pages", _sizes, _build_load, runs=generates)
