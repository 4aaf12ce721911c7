"""KV pages out of the pool, on their way to host memory."""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.kv import KVCache
from jaxllm.cache.transfer import Page, page_shapes, take
from jaxllm.engine.runtime.program import KV, Program, Variant, shardings
from jaxllm.engine.runtime.shapes import StepShapes


def save_pages(
    kv: KVCache, buffer: Array, *, local: NamedSharding
) -> tuple[KVCache, tuple[Page, ...]]:
    """(the pool, the pages that `buffer` numbers as arrays of their own)."""
    return take(kv, jax.device_put(buffer, local))


def _build(shapes: StepShapes, pages: int) -> Variant:
    return Variant(
        functools.partial(save_pages, local=shapes.replicated),
        takes=(KV, shapes.host_buffer(pages)),
        gives=(KV, (shardings(page_shapes(shapes.kv)),) * pages),
    )


PROGRAM = Program(
    "save_pages",
    sizes=lambda shapes: [(shapes.moved_pages,)] if shapes.moved_pages else [],
    build=_build,
)
