"""Draws over a vocabulary that several devices share are those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.mesh import make_mesh, per_device
from jaxllm.sampling.sample import BROKEN, DrawRows, Sampler, sample
from jaxllm.sampling.split_vocabulary import SplitVocabulary
from pallas_kernels.all_reduce import Group

V = 64


def rows_of(count: int) -> DrawRows:
    full = lambda value, dtype: jnp.full((count,), value, dtype)
    return DrawRows(
        temperature_B=full(0.8, jnp.float32),
        top_k_B=jnp.arange(count, dtype=jnp.int32) + 3,
        top_p_B=full(0.9, jnp.float32),
        min_p_B=full(0.0, jnp.float32),
        key_B2=jnp.arange(2 * count, dtype=jnp.uint32).reshape(count, 2),
        banned_BK=full(-1, jnp.int32)[:, None],
    )


def split(logits: jax.Array, rows: DrawRows, sampler: Sampler, devices: int) -> jax.Array:
    mesh = make_mesh(devices)
    own, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "tensor"), ()))
    draw = SplitVocabulary(Group("tensor", devices)).sample

    def run(logits: jax.Array, rows: DrawRows) -> jax.Array:
        return draw(logits, rows, sampler, "reference")

    given = own, jax.tree.map(lambda _: whole, rows)
    return jax.jit(per_device(run, mesh, given, whole))(logits, rows)


@pytest.mark.parametrize("sampler", Sampler)
@pytest.mark.parametrize(("count", "devices"), [(4, 2), (3, 4)])
def test_tokens_are_those_of_one_device(sampler: Sampler, count: int, devices: int) -> None:
    logits = jax.random.normal(jax.random.key(3), (count, V)) * 3
    found = split(logits, rows_of(count), sampler, devices)
    np.testing.assert_array_equal(found, sample(logits, rows_of(count), sampler))


def test_of_equal_logits_the_first_wins_and_broken_rows_are_told() -> None:
    logits = np.zeros((5, V), np.float32)
    logits[1, [20, 40, 63]] = 7.0
    logits[2, 50], logits[3, 1] = np.nan, np.inf
    logits[4] = -np.inf
    found = split(jnp.asarray(logits), rows_of(5), Sampler.GREEDY, 4)
    assert found.tolist() == [0, 20, BROKEN, BROKEN, BROKEN]
