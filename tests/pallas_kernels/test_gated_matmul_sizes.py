"""Sizes of the Hopper gated product as plain numbers: for any shape that the kernel takes, blocks
cover the product, fit the card, and leave XLA what XLA does as well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_matmul import BACKENDS, SILU, find, plan
from pallas_kernels.gated_matmul.cases import CASES, MODEL_SHAPES, expected, inputs
from pallas_kernels.gated_matmul.plan import (
    MAX_N,
    SHARED_BYTES,
    STAGING_BYTES,
    WARPGROUPS,
    K,
    Tuning,
    bands,
    chunk_of,
    stages_of,
    tuning_of,
)
from pallas_kernels.target import PORTABLE
from tests.targets import A100, H200

shapes = {
    "M": st.one_of(st.integers(1, 300), st.integers(1, 9000)),
    "O": st.integers(1, 2400).map(lambda n: 16 * n),
    "I": st.integers(1, 80).map(lambda n: 64 * n),
}


@settings(max_examples=60, deadline=None)
@given(**shapes)
def test_sizes_are_legal_for_every_shape(M: int, O: int, I: int) -> None:
    found = tuning_of(M, O, I)
    assert found.rows in WARPGROUPS and found.n % 16 == 0
    assert 16 <= found.n <= MAX_N[found.rows]
    assert 4 <= found.stages <= 8 and found.cluster in (1, 2)
    assert found.rows % found.warpgroups == 0 and (found.rows // found.warpgroups) % 64 == 0


@settings(max_examples=60, deadline=None)
@given(**shapes)
def test_ring_and_staged_outputs_fit_shared_memory(M: int, O: int, I: int) -> None:
    found = tuning_of(M, O, I)
    height = found.rows // found.warpgroups
    chunk = chunk_of(height, found.n // 2, found.warpgroups, O // 2)
    staged = found.rows * chunk * 2
    ring = found.stages * (found.rows + found.n) * K * 2
    assert staged <= STAGING_BYTES and ring + staged <= SHARED_BYTES


@settings(max_examples=60, deadline=None)
@given(**shapes)
def test_staged_chunks_divide_a_blocks_columns_in_boxes_that_divide_the_output(
    M: int,
    O: int,
    I: int,
) -> None:
    found = tuning_of(M, O, I)
    width = found.n // 2
    chunk = chunk_of(found.rows // found.warpgroups, width, found.warpgroups, O // 2)
    assert width % chunk == 0
    box = min(64, chunk & -chunk)
    assert chunk % box == 0 and O // 2 % box == 0


@pytest.mark.parametrize("rows", WARPGROUPS)
@pytest.mark.parametrize("M", [1, 63, 64, 65, 191, 192, 193, 256, 1000])
def test_bands_cover_all_rows_and_none_is_empty(M: int, rows: int) -> None:
    count = bands(M, rows)
    assert (count - 1) * rows < M <= count * rows


@pytest.mark.parametrize("M", [1, 64, 65, 128, 129, 192, 193, 256])
def test_up_to_256_rows_are_one_band(M: int) -> None:
    for O, I in MODEL_SHAPES.values():
        assert bands(M, tuning_of(M, O, I).rows) == 1


@pytest.mark.parametrize("rows", WARPGROUPS)
def test_wider_tiles_leave_room_for_no_more_slots(rows: int) -> None:
    found = [stages_of(rows, n, 4096) for n in range(32, MAX_N[rows] + 1, 32)]
    assert found == sorted(found, reverse=True)


def test_a_model_of_more_work_takes_no_less_time() -> None:
    tuning = Tuning(rows=128, n=128)
    times = [plan._seconds(M, 4096, 4096, tuning) for M in (128, 256, 1024, 8192)]
    assert times == sorted(times)
    times = [plan._seconds(128, 4096, width, tuning) for width in (64, 1024, 4096)]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize(
    ("rows", "mib", "faster"),
    [
        (1, 512, False),
        (63, 512, False),
        (64, 64, True),
        (64, 63, False),
        (256, 64, True),
        (257, 512, False),
        (1023, 512, False),
        (1024, 8, True),
        (1024, 7, False),
        (8192, 512, True),
    ],
)
def test_the_kernel_is_taken_within_its_measured_bounds(rows: int, mib: int, faster: bool) -> None:
    assert plan.is_faster(rows, mib << 20) == faster


def test_a_back_end_is_none_where_it_is_slower_refuses_or_is_the_reference() -> None:
    def shape(M: int, O: int, dtype: str = "bfloat16") -> tuple[jax.ShapeDtypeStruct, ...]:
        types = jnp.dtype(dtype)
        return jax.ShapeDtypeStruct((M, 4096), types), jax.ShapeDtypeStruct((O, 4096), types)

    fast = shape(256, 28672)
    assert find(H200, *fast, SILU) == "mosaic_gpu"
    assert find(PORTABLE, *fast, SILU) is None
    assert find(A100, *fast, SILU) is None, "a card that this op has no kernel for"
    assert find(H200, *shape(16, 28672), SILU) is None
    assert find(H200, *shape(256, 28672, "float32"), SILU) is None
    assert find(H200, *shape(256, 28680), SILU) is None


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((3, 64), (32, 128), r"x \[M, I\] and w \[O, I\], got \(3, 64\) and \(32, 128\)"),
        ((0, 64), (32, 64), r"got \(0, 64\)"),
        ((3, 4, 64), (32, 64), r"got \(3, 4, 64\)"),
        ((3, 64), (24, 64), r"O a multiple of 16 and I of 64, got w \(24, 64\)"),
        ((3, 96), (32, 96), r"got w \(32, 96\)"),
        ((3, 64), (0, 64), r"got w \(0, 64\)"),
    ],
)
def test_shapes_that_are_refused_are_named(
    x: tuple[int, ...], w: tuple[int, ...], message: str
) -> None:
    given = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w))
    with pytest.raises(ValueError, match=message):
        BACKENDS.check("mosaic_gpu", *given, SILU)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_is_odd_in_up_and_zero_where_up_is_zero(case: object) -> None:
    x, w = inputs(case)  # type: ignore[arg-type]
    half = len(w) // 2
    gate, up = w[:half], w[half:]
    plain = expected(x, w, SILU)
    np.testing.assert_allclose(expected(x, np.concatenate([gate, -up]), SILU), -plain)
    assert not expected(x, np.concatenate([gate, 0 * up]), SILU).any()
    assert plain.shape == (len(x), half)
