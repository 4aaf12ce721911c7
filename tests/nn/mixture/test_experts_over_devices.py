"""Devices with experts of their own, and with shares of their width, add up to the mixture."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache.collective import ALONE, over
from jaxllm.cache.row_kernels import RowKernels
from jaxllm.mesh import make_mesh, over_experts, per_device, sharding
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import DOWN, UP, ExpertMaps, Experts, MixtureMLP, Split
from jaxllm.nn.mixture.routers import Router, Routing
from pallas_kernels.gated_matmul import SILU

TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 9, 5, 2, 8, 4


def mixture(split: Split) -> MixtureMLP:
    """Five experts with biases, of numbers that do not depend on the split."""
    init, rng = Init(nnx.Rngs(0), jnp.float32), np.random.default_rng(1)
    up = ExpertMaps(init, (EXPERTS, 2 * INNER, WIDTH), UP, 2, bias=True, split=split)
    down = ExpertMaps(init, (EXPERTS, WIDTH, INNER), DOWN, bias=True, split=split)
    for maps in (up, down):
        order = [row for block in maps.blocks for row in block]
        spare = [(0, split.held(EXPERTS) - EXPERTS)]
        weight, bias = (rng.standard_normal(maps.shape[:n]) for n in (3, 2))
        maps.weight[...] = jnp.pad(weight[:, order], [*spare, (0, 0), (0, 0)])
        maps.bias[...] = jnp.pad(bias[:, order], [*spare, (0, 0)])
    experts = Experts(up, down, SILU)
    return MixtureMLP(Router(init, WIDTH, EXPERTS, Routing(CHOICES)), experts)


@pytest.mark.parametrize(
    ("groups", "shards"),
    [
        pytest.param(*split, marks=pytest.mark.slow if split in ((2, 1), (4, 1)) else [])
        for split in ((2, 1), (1, 2), (2, 2), (4, 1))
    ],
)
def test_parts_of_devices_add_up_to_the_mixture(groups: int, shards: int) -> None:
    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH)) * 3
    wanted = ALONE.sum(mixture(Split())(x, DenseContext()))
    mesh = over_experts(make_mesh(groups * shards), groups)
    graphdef, state = nnx.split(mixture(Split(groups, shards)))
    places = jax.tree.map(
        lambda parameter: parameter.replace(sharding(mesh, parameter.get_metadata("axes"))),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    collective = over(mesh)

    def one(state: nnx.State, x: jax.Array) -> jax.Array:
        context = RowKernels(collective=collective)
        return collective.sum(nnx.merge(graphdef, state)(x, context))

    whole = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(per_device(one, mesh, (places, whole), whole))(state, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
