"""The copy of pages on the device: every layer's keys and values, in place, and nothing else."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache.arrays import PAGES, PagedArrays, page_counts
from jaxllm.cache.transfer import page_shapes, put
from jaxllm.engine.runtime.programs.move_pages import LAYERS_AT_ONCE, copy_pages
from jaxllm.mesh import make_mesh
from tests.by_layer import abstract_kv, by_layer

LAYERS, HEADS, PAGE, DIM = LAYERS_AT_ONCE + 3, 4, 4, 8


def compiled(shards: int, num_pages: int, pairs: int, layers: int = LAYERS) -> jax.stages.Compiled:
    mesh = make_mesh(shards)
    kv = abstract_kv(layers, num_pages, HEADS, PAGE, DIM, jnp.float32, mesh)
    local = NamedSharding(mesh, PartitionSpec())
    buffer = jax.ShapeDtypeStruct((2 * pairs,), jnp.int32, sharding=local)
    out = jax.tree.map(lambda s: s.sharding, kv)
    return (
        jax.jit(functools.partial(copy_pages, local=local), donate_argnums=0, out_shardings=out)
        .lower(kv, buffer)
        .compile()
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_pages_are_copied_in_every_layer_and_all_sources_are_read_first(shards: int) -> None:
    rng, mesh = np.random.default_rng(0), make_mesh(shards)
    before = rng.standard_normal((2, LAYERS, 10, HEADS, PAGE, DIM)).astype(np.float32)
    k, v = (
        jax.device_put(x.reshape(-1, HEADS, PAGE, DIM), NamedSharding(mesh, PAGES)) for x in before
    )
    buffer = jax.device_put(
        np.array([3, 7, 0, 0, 7, 2, 10, 10], np.int32), NamedSharding(mesh, PartitionSpec())
    )
    after = compiled(shards, 10, 4)((PagedArrays((k, v), layers=LAYERS),), buffer)
    expected = before.copy()
    expected[:, :, [7, 2]] = before[:, :, [3, 7]]
    np.testing.assert_array_equal(np.stack(by_layer(after)), expected)


def test_kinds_of_layers_have_page_numbers_of_their_own() -> None:
    mesh, rng = make_mesh(1), np.random.default_rng(1)
    counts, local = (6, 4), NamedSharding(mesh, PartitionSpec())
    like = tuple(
        arrays
        for layers, pages in zip((2, 1), counts, strict=True)
        for arrays in abstract_kv(layers, pages, HEADS, PAGE, DIM, jnp.float32, mesh)
    )
    assert page_counts(like) == counts
    assert [x.shape[0] for arrays in like for x in arrays.planes] == [12, 12, 4, 4]
    assert [like[0].first_page(index) for index in range(2)] == [0, 6]
    kv = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), jnp.float32), like)
    before = [np.asarray(x) for x in by_layer(kv)]
    # Of kind 0: 2 to 5, nothing; of kind 1: 1 to 3, 2 to 0
    buffer = jnp.array([2, 0, 5, 6, 1, 2, 3, 0], jnp.int32)
    after = jax.jit(functools.partial(copy_pages, local=local))(kv, buffer)
    for old, new, kind in zip(before, by_layer(after), (0, 1) * 2, strict=True):
        expected = old.copy()
        for source, target in (((2, 5),), ((1, 3), (2, 0)))[kind]:
            expected[:, target] = old[:, source]
        np.testing.assert_array_equal(np.asarray(new), expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_copy_is_in_place_and_needs_no_communication(shards: int) -> None:
    program, pool = compiled(shards, 4096, 16), 4096 * HEADS * PAGE * DIM * 4 // shards
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * LAYERS * pool
    assert memory.temp_size_in_bytes < pool / 4
    assert not any(
        word in program.as_text()
        for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    )


def test_the_copy_needs_no_more_memory_for_many_layers_than_for_some() -> None:
    some, many = (
        compiled(1, 64, 16, layers).memory_analysis().temp_size_in_bytes
        for layers in (LAYERS_AT_ONCE, 41)
    )
    assert many < 2 * some


def test_pages_are_scattered_along_the_first_axis() -> None:
    """Along another one XLA for GPUs brings the whole pool into another layout and back."""
    mesh, local = make_mesh(1), NamedSharding(make_mesh(1), PartitionSpec())
    kv = abstract_kv(LAYERS, 64, HEADS, PAGE, DIM, jnp.float32, mesh)
    page, numbers = page_shapes(kv), jax.ShapeDtypeStruct((2,), jnp.int32)
    programs = [
        jax.jit(functools.partial(copy_pages, local=local)).lower(
            kv, jax.ShapeDtypeStruct((4,), jnp.int32)
        ),
        jax.jit(put).lower(kv, numbers, (page, page)),
    ]
    for program in programs:
        scattered = re.findall(r"scatter_dims_to_operand_dims = \[([\d, ]*)\]", program.as_text())
        assert scattered and set(scattered) == {"0"}
