"""Residual sum and norm: every back end passes the shared cases; the Hopper one interpreted and
lowered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.cache.collective import ALONE
from pallas_kernels.add_norm import add_norm, choose, find, mosaic_gpu
from pallas_kernels.add_norm.cases import CASES, Case, expected, inputs
from pallas_kernels.backends import UnknownBackend
from pallas_kernels.parts import WeightedRows
from pallas_kernels.target import PORTABLE
from tests.pallas_kernels.places import jitted
from tests.targets import A100, H200

ULP = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-10}


def arguments(case: Case, dtype: Any) -> tuple[Any, Any, Any]:
    given = inputs(case)
    return (
        jnp.asarray(given.x, dtype),
        jnp.asarray(given.delta, dtype),
        jnp.asarray(given.weight, dtype),
    )


def assert_right(
    case: Case, dtype: str, given: tuple[Any, Any, Any], got: tuple[jax.Array, jax.Array]
) -> None:
    total, norm = expected(case, *(np.asarray(x) for x in given))
    assert [x.dtype for x in got] == [dtype, dtype]
    np.testing.assert_array_equal(np.asarray(got[0], np.float64), total)
    np.testing.assert_allclose(np.asarray(got[1], np.float64), norm, rtol=ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_reference_equals_float64_up_to_one_rounding(case: Case, dtype: str) -> None:
    given = arguments(case, dtype)
    assert_right(case, dtype, given, add_norm(*given, case.eps, backend="reference"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_interpreted_kernel_equals_float64_up_to_one_rounding(case: Case, dtype: str) -> None:
    given = arguments(case, dtype)
    got = jitted(mosaic_gpu.add_norm)(
        *given, eps=case.eps, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    assert_right(case, dtype, given, got)


def test_the_interpreted_kernel_takes_weights_in_float32() -> None:
    case = next(case for case in CASES if case.width == 896)
    x, delta, _ = arguments(case, "bfloat16")
    given = x, delta, jnp.asarray(inputs(case).weight)
    got = jitted(mosaic_gpu.add_norm)(
        *given, eps=case.eps, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    assert_right(case, "bfloat16", given, got)


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("width", [128, 896, 1024, 2560, 3584, 4096, 5120, 8192, 16384])
def test_the_kernel_lowers_for_cuda_as_one_launch(width: int, rows: int) -> None:
    x, weight = (
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width,), jnp.bfloat16),
    )
    text = (
        jitted(mosaic_gpu.add_norm)
        .trace(x, x, weight, eps=1e-6)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "message"),
    [
        (1, 192, "bfloat16", "multiple of 128"),
        (1, 16512, "bfloat16", "up to 16384"),
        (257, 128, "bfloat16", "1 to 256 rows"),
        (0, 128, "bfloat16", "1 to 256 rows"),
        (1, 128, "float32", "bfloat16 or float16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_and_left_to_the_reference(
    rows: int, width: int, dtype: str, message: str
) -> None:
    x, weight = jnp.ones((rows, width), dtype), jnp.ones(width, dtype)
    with pytest.raises(ValueError, match=message):
        add_norm(x, x, weight, 1e-6, backend="mosaic_gpu")
    assert choose(H200, x, weight) == "reference"


@pytest.mark.parametrize(("width", "choices", "some"), [(8192, 5, False), (128, 2, True)])
def test_rows_that_the_kernel_does_not_add_up_are_left_to_the_reference(
    width: int, choices: int, some: bool
) -> None:
    x, weight = jnp.ones((1, width), jnp.bfloat16), jnp.ones(width, jnp.bfloat16)
    place_TK = jnp.arange(choices)[None]
    own_TK = jnp.zeros((1, choices), bool) if some else None
    y = jnp.ones((choices, width), jnp.bfloat16)
    rows = WeightedRows(y, place_TK, jnp.ones((1, choices)), own_TK)
    with pytest.raises(ValueError, match="add them up before"):
        add_norm(x, rows, weight, 1e-6, backend="mosaic_gpu")
    assert find(H200, x, weight, rows) is None
    total, _ = ALONE.add_norm(x, rows, weight, 1e-6, PORTABLE)
    if not some:
        np.testing.assert_array_equal(
            total, add_norm(x, rows, weight, 1e-6, backend="reference")[0]
        )
    np.testing.assert_array_equal(np.float32(total), 1 if some else 1 + choices)
    # The kernel of the norm is still taken where rows are added up before it
    run = lambda x, weight: ALONE.add_norm(x, rows, weight, 1e-6, H200)
    text = jax.jit(run).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_the_kernel_is_chosen_where_it_is_wanted_and_takes_the_arrays() -> None:
    x, weight = jnp.ones((1, 128), jnp.bfloat16), jnp.ones(128, jnp.bfloat16)
    assert choose(H200, x, weight) == "mosaic_gpu"
    assert choose(A100, x, weight) == "reference"


@pytest.mark.parametrize(("delta", "weight"), [((2, 128), 128), ((1, 128), 256)])
def test_arrays_that_do_not_fit_together_are_refused(delta: tuple[int, int], weight: int) -> None:
    with pytest.raises(ValueError, match="weight"):
        mosaic_gpu.add_norm(
            *(jnp.ones(shape, jnp.bfloat16) for shape in ((1, 128), delta, (weight,))), 1e-6
        )


def test_an_unknown_back_end_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        UnknownBackend,
        match=r"add_norm has no back end 'cuda'; choose one of: reference, mosaic_gpu",
    ):
        add_norm(jnp.ones((1, 8)), jnp.ones((1, 8)), jnp.ones(8), 1e-6, backend="cuda")
