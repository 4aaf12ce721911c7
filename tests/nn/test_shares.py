"""Products of plain numbers in shares of their columns, which the norm behind them adds up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.row_kernels import RowKernels
from jaxllm.nn.linear import Init, Linear
from pallas_kernels.parts import (
    FEWEST_COLUMNS,
    MOST_NUMBERS,
    MOST_ROWS,
    SHARES,
    Parts,
    takes_shares,
)
from pallas_kernels.target import PORTABLE, Target
from tests.targets import H200

WIDTH = 24


def map_of(columns: int, *, bias: bool = False) -> Linear:
    init = Init(nnx.Rngs(0), jnp.bfloat16)
    return Linear(init, (WIDTH,), (columns,), ("embed", "mlp"), bias)


def rows_of(rows: int, columns: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, columns), jnp.bfloat16)


def test_a_long_product_of_one_row_is_in_shares_that_add_up_to_it() -> None:
    linear, x = map_of(FEWEST_COLUMNS), rows_of(1, FEWEST_COLUMNS)
    part = linear.part(x, RowKernels(H200))
    assert isinstance(part, Parts)
    assert part.sums.shape == (SHARES, 1, WIDTH) and part.sums.dtype == jnp.float32
    wanted = np.asarray(x, np.float64) @ np.asarray(linear.weight[...], np.float64).T
    np.testing.assert_allclose(np.asarray(part.sums, np.float64).sum(axis=0), wanted, rtol=1e-4)
    assert part.whole.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(part.whole, np.float64), wanted, rtol=2**-8)


@pytest.mark.parametrize(
    ("target", "rows", "columns", "bias"),
    [
        (PORTABLE, 1, FEWEST_COLUMNS, False),
        (H200, MOST_ROWS + 1, FEWEST_COLUMNS, False),
        (H200, 1, FEWEST_COLUMNS // 2, False),
        (H200, 1, FEWEST_COLUMNS + 2, False),
        (H200, 1, FEWEST_COLUMNS, True),
    ],
)
def test_other_products_are_whole(target: Target, rows: int, columns: int, bias: bool) -> None:
    found = map_of(columns, bias=bias).part(rows_of(rows, columns), RowKernels(target))
    assert isinstance(found, jax.Array) and found.dtype == jnp.bfloat16


def test_float32_and_large_weights_are_computed_as_they_were() -> None:
    most = MOST_NUMBERS // FEWEST_COLUMNS
    for dtype, outputs, taken in (
        ("bfloat16", most, True),
        ("bfloat16", most + 1, False),
        ("float32", WIDTH, False),
    ):
        x = jax.ShapeDtypeStruct((1, FEWEST_COLUMNS), dtype)
        assert takes_shares(H200, x, outputs) == taken
