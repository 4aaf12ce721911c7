"""Sums over virtual devices: the reference against float64, and the exchange of greedy draws
against an argmax."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.all_reduce import Group, add_norm, all_reduce, choose, largest
from pallas_kernels.all_reduce.cases import CASES, Case, expected, inputs
from pallas_kernels.backends import UnknownBackend
from pallas_kernels.scaled_matmul import Rounding


def over(devices: int, function: Any, *specs: P) -> Any:
    """`function(…, group=…)` on each of some virtual devices; results one after another by
    device."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("tensor",))
    group = Group("tensor", devices)

    def each(*given: Any) -> Any:
        return jax.tree.map(lambda y: y[None], function(*given, group=group, backend="reference"))

    return jax.jit(
        jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.04)])
def test_sum_and_norm_are_float64s_and_equal_on_all_devices(
    case: Case, dtype: str, error: float
) -> None:
    x, parts, weight = (jnp.asarray(a, dtype) for a in inputs(case))
    run = over(
        case.devices,
        lambda x, part, weight, **how: (
            *add_norm(x, part[0], weight, case.eps, **how),
            all_reduce(part[0], **how),
        ),
        *(P(), P("tensor"), P()),
    )
    total, norm, summed = run(x, parts, weight)
    wanted = expected(case, *(np.asarray(a, np.float64) for a in (x, parts, weight)))
    alone = wanted[0] - np.asarray(x, np.float64)
    for got, right in zip((total, norm, summed), (*wanted, alone), strict=True):
        assert got.dtype == dtype
        values = np.asarray(got, np.float64)
        assert (values == values[:1]).all()
        np.testing.assert_allclose(values[0], right, rtol=error, atol=error)


def test_a_rounded_norm_is_the_norm_of_the_sum_rounded() -> None:
    case = CASES[0]
    given = [jnp.asarray(a, jnp.float32) for a in inputs(case)]
    rounding = Rounding(jnp.float8_e4m3fn, len(given[0]) + 1)
    specs = P(), P("tensor"), P()

    def run(**options: Any) -> Any:
        return over(
            case.devices,
            lambda x, part, weight, **how: add_norm(x, part[0], weight, case.eps, **options, **how),
            *specs,
        )(*given)

    (_, plain), (_, found) = run(), run(rounding=rounding)
    for device in range(case.devices):
        wanted = rounding.of(plain[device])
        np.testing.assert_array_equal(found.numbers[device], wanted.numbers)
        np.testing.assert_allclose(found.scale[device], wanted.scale, rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_largest_over_devices_is_the_argmax_of_all(devices: int) -> None:
    rng = np.random.default_rng(devices)
    # Few different values, so that equal ones meet; rows of one value, of infinities and of NaN
    logits = rng.integers(-3, 3, (20, 8 * devices)).astype(np.float32)
    logits[0], logits[1], logits[2, 3] = -np.inf, 0.0, np.inf
    logits[3, 5] = logits[4, 0] = logits[4, -1] = np.nan
    logits[5], logits[5, -1] = -0.0, 0.0

    def best(part: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array]:
        first = jax.lax.axis_index("tensor") * part.shape[1]
        index = jnp.argmax(part, axis=1).astype(jnp.int32) + first
        return largest(jnp.max(part, axis=1), index, **how)

    value, index = over(devices, best, P(None, "tensor"))(logits)
    for device in range(devices):
        np.testing.assert_array_equal(index[device], np.asarray(jnp.argmax(logits, axis=1)))
        np.testing.assert_array_equal(value[device], logits.max(axis=1))


def test_other_back_ends_are_named_or_left_for_the_reference() -> None:
    group, part = Group("tensor", 2), jnp.ones((1, 256), jnp.bfloat16)
    assert choose(group, part) == "reference"
    with pytest.raises(UnknownBackend, match="all_reduce has no back end 'nccl'"):
        all_reduce(part, group=group, backend="nccl")


def test_a_group_passes_through_jit_as_its_arrays() -> None:
    same = jax.jit(lambda group: group)(Group("tensor", 4))
    assert same == Group("tensor", 4)
    assert functools.reduce(lambda n, _: n + 1, jax.tree.leaves(same), 0) == 0
