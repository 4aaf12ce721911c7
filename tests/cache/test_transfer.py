"""Pages out of the pool and back into it, without a copy of the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.arrays import KVCache
from jaxllm.cache.transfer import page_shapes, put, take
from jaxllm.mesh import make_mesh
from tests.by_layer import abstract_kv, by_layer

PAGES, HEADS, SIZE, DIM = 24, 8, 4, 8


def pool(layers: int, dtype: str, devices: int = 1) -> KVCache:
    """A pool of random contents."""
    like = abstract_kv(layers, PAGES, HEADS, SIZE, DIM, dtype, make_mesh(devices))
    keys = iter(jax.random.split(jax.random.key(0), 3 * layers))
    return jax.tree.map(
        lambda s: jax.device_put(
            jax.random.normal(next(keys), s.shape).astype(s.dtype), s.sharding
        ),
        like,
    )


def same(one: KVCache, other: KVCache, pages: list[int]) -> bool:
    """Whether the pages are equal bit for bit."""
    pairs = zip(by_layer(one), by_layer(other), strict=True)
    return all(
        np.array_equal(
            np.asarray(a)[:, pages].view(np.uint8), np.asarray(b)[:, pages].view(np.uint8)
        )
        for a, b in pairs
    )


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_pages_come_back_as_they_went_and_the_others_stay(dtype: str, devices: int) -> None:
    kv = pool(3, dtype, devices)
    before = jax.tree.map(lambda x: x.copy(), kv)
    kv, pages = jax.jit(take, donate_argnums=0)(kv, jnp.array([5, 0, 23, PAGES]))
    assert same(kv, before, list(range(PAGES)))
    assert [jax.tree.map(lambda x: x.shape, page) for page in pages[:1]] == [
        jax.tree.map(lambda s: s.shape, page_shapes(before))
    ]
    kv = jax.tree.map(jnp.zeros_like, kv)
    kv, _ = jax.jit(put, donate_argnums=0)(kv, jnp.array([7, 2, PAGES, PAGES + 1]), pages)
    untouched = [page for page in range(PAGES) if page not in (2, 7)]
    assert all(not np.asarray(leaf)[:, untouched].astype(np.float32).any() for leaf in by_layer(kv))
    (arrays,) = before
    to, come = (arrays.page_rows(jnp.array(pages)) for pages in ([7, 2], [5, 0]))
    moved = arrays.map(lambda x: x.at[to].set(x[come]))
    assert same(kv, (moved,), [2, 7])


def test_arrays_of_one_shape_travel_as_one() -> None:
    shapes = page_shapes(abstract_kv(3, PAGES, HEADS, SIZE, DIM, "float8_e4m3fn", make_mesh(1)))
    assert [s.shape for s in shapes] == [(6, HEADS, SIZE, DIM), (3, HEADS, 2, SIZE)]


# XLA's CPU compiler converts arrays of 8-bit floats as a whole
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_program_makes_a_copy_of_the_pool(dtype: str) -> None:
    like, count = abstract_kv(4, 512, HEADS, SIZE, DIM, dtype, make_mesh(1)), 2
    numbers, page = jax.ShapeDtypeStruct((count,), jnp.int32), page_shapes(like)
    whole = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(like))
    moved = count * sum(s.size * s.dtype.itemsize for s in page)
    for function, arguments in ((take, (like, numbers)), (put, (like, numbers, (page,) * count))):
        memory = (
            jax.jit(function, donate_argnums=0, keep_unused=True)
            .lower(*arguments)
            .compile()
            .memory_analysis()
        )
        assert memory.alias_size_in_bytes >= whole
        assert memory.temp_size_in_bytes <= 4 * moved < whole / 4
