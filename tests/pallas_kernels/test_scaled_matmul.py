"""The scaled product against float64, and its rounding."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.scaled_matmul import INPUTS, choose, rounded, scaled_matmul
from pallas_kernels.scaled_matmul.cases import CASES, Case, expected, inputs
from pallas_kernels.scaled_matmul.rounding import rounded_inputs
from tests.targets import TPU

GOLDEN = np.load(Path(__file__).parents[1] / "goldens/rounded.npz")
GROUP, GIVEN = 128, 0.02  # of the golden


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
    found = product(jnp.asarray(given.x, dtype), given.weight, given.scale, given.input_scale)
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
    assert choose(TPU, *arrays, 2, "token") == "reference"
    with pytest.raises(UnknownBackend, match="scaled_matmul has no back end 'none'"):
        scaled_matmul(*arrays, group=2, inputs="token", backend="none")


@pytest.mark.parametrize("name", sorted({name.partition("/")[0] for name in GOLDEN}))
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(name: str) -> None:
    settings = json.loads(str(GOLDEN[f"{name}/settings"]))
    dtype = jnp.int8 if settings["type"] == "int" else ml_dtypes.float8_e4m3fn
    kind, x = name.split()[1], jnp.asarray(GOLDEN[f"{name}/x"])
    group = GROUP if kind == "group" else x.shape[1]
    weight, scale = GOLDEN[f"{name}/w_numbers"].view(dtype), GOLDEN[f"{name}/w_scale"]

    numbers, found = rounded_inputs(x, dtype, group, kind, jnp.float32(GIVEN))
    np.testing.assert_allclose(found, GOLDEN[f"{name}/x_scale"].reshape(found.shape), rtol=1e-6)
    wanted = GOLDEN[f"{name}/x_numbers"]
    wanted = (wanted if kind == "shifted" else wanted.view(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(numbers, np.float32), wanted)

    y = scaled_matmul(
        x,
        weight,
        scale,
        group=group,
        inputs=kind,
        input_scale=jnp.float32(GIVEN),
        backend="reference",
    )
    error = np.asarray(y) - GOLDEN[f"{name}/y"]
    assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(GOLDEN[f"{name}/y"])
