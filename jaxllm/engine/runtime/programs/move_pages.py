"""KV pages between the pool and host memory: out of the pool, and into it."""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.kv import KVCache
from jaxllm.cache.transfer import Page, page_shapes, put, take
from jaxllm.engine.runtime.program import KV, Program, Sizes, Variant, shardings
from jaxllm.engine.runtime.shapes import StepShapes


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


SAVE_PAGES = Program("save_pages", _sizes, _build_save)
LOAD_PAGES = Program("load_pages", _sizes, _build_load)
