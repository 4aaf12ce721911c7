"""KV pages from host memory into the pool."""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.kv import KVCache
from jaxllm.cache.transfer import Page, page_shapes, put
from jaxllm.engine.runtime.program import KV, Program, Variant
from jaxllm.engine.runtime.shapes import StepShapes


def load_pages(
    kv: KVCache, buffer: Array, pages: tuple[Page, ...], *, local: NamedSharding
) -> tuple[KVCache, Array]:
    """(the pool with `pages` at the numbers of `buffer`, a value that is there when they are)."""
    return put(kv, jax.device_put(buffer, local), pages)


def _build(shapes: StepShapes, pages: int) -> Variant:
    return Variant(
        functools.partial(load_pages, local=shapes.replicated),
        takes=(KV, shapes.host_buffer(pages), (page_shapes(shapes.kv),) * pages),
        gives=(KV, shapes.replicated),
    )


PROGRAM = Program(
    "load_pages",
    sizes=lambda shapes: [(shapes.moved_pages,)] if shapes.moved_pages else [],
    build=_build,
)
