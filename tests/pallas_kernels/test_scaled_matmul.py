"""The scaled product against float64, and its rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.scaled_matmul import INPUTS, backend_for, rounded, scaled_matmul
from pallas_kernels.scaled_matmul.cases import CASES, Case, expected, inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)])
def test_products_are_those_of_the_definition(case: Case, dtype: jnp.dtype, bound: float) -> None:
    given = inputs(case)
    given = given._replace(x=given.x.astype(dtype).astype(np.float32))
    product = jax.jit(
        lambda x, w, s, g: scaled_matmul(
            x,
            w,
            s,
            group=case.group or case.columns,
            inputs=case.inputs,
            input_scale=g,
            backend="reference",
        )
    )
    found = product(jnp.asarray(given.x, dtype), given.weight, given.scale, given.given)
    assert found.dtype == dtype and found.shape == (case.tokens, case.outputs)
    wanted = expected(case, given)
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < bound


def test_cases_round_in_every_way() -> None:
    assert {case.inputs for case in CASES} == set(INPUTS)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8], ids=["fp8", "int8"])
def test_rounded_numbers_use_the_whole_type(dtype: jnp.dtype) -> None:
    x = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    x[2] = 0
    number, scale = rounded(jnp.asarray(x), dtype, 20)
    assert number.dtype == dtype and scale.shape == (4, 3)
    limit = 448 if dtype == jnp.float8_e4m3fn else 127
    most = np.maximum.reduceat(np.abs(np.asarray(number, np.float32)), [0, 20, 40], axis=1)
    np.testing.assert_array_equal(most, np.full((4, 3), limit) * (np.arange(4) != 2)[:, None])
    wide = np.repeat(np.asarray(scale), 20, axis=1)[:, :50]
    step = 2.0**-4 * np.abs(x) + wide * 2.0**-10 if limit == 448 else wide / 2 * (1 + 1e-6)
    assert (np.abs(np.asarray(number, np.float32) * wide - x) <= step).all()


def test_a_given_scale_that_is_too_small_gives_the_largest_numbers() -> None:
    weight = np.ones((1, 2), ml_dtypes.float8_e4m3fn)
    x, scale, given = jnp.array([[1e4, -1e4]]), jnp.ones((1, 1)), jnp.float32(1)
    both = scaled_matmul(
        x, weight, scale, group=2, inputs="given", input_scale=given, backend="reference"
    )
    one = scaled_matmul(
        x[:, :1],
        weight[:, :1],
        scale,
        group=1,
        inputs="given",
        input_scale=given,
        backend="reference",
    )
    assert float(both[0, 0]) == 0 and float(one[0, 0]) == 448


def test_back_ends_that_it_lacks_are_the_reference() -> None:
    arrays = (jnp.ones((1, 2)), jnp.ones((3, 2), jnp.int8), jnp.ones((3, 1)))
    assert backend_for("mosaic_tpu", *arrays, 2, "token") == "reference"
    with pytest.raises(UnknownBackend, match="scaled_matmul has no back end 'none'"):
        scaled_matmul(*arrays, group=2, inputs="token", backend="none")
