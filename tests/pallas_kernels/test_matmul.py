"""Products of some hundred tokens with 16-bit weights: the kernel in the interpreter and on a card,
its sizes, and where it is chosen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.matmul import find, matmul, matmul_parts, mosaic_gpu, plan
from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.mosaic_units import PROCESSORS, ROWS, STAGED
from pallas_kernels.parts import Parts, whole
from pallas_kernels.target import PORTABLE
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)
from tests.targets import H200, TPU

ERROR = {"bfloat16": 5e-3, "float16": 1e-3}
reference = functools.partial(matmul, backend="reference")
# Tokens, outputs, inputs, and sizes: whole, shares, several tiles of tokens of which the last is
# cut, rows of the weight cut
SMALL = [
    (9, 128, 192, Tuning(16, 2, 64, 2, 1)),
    (9, 64, 320, Tuning(16, 1, 64, 2, 2)),
    (150, 72, 128, Tuning(80, 1, 64, 2, 1)),
    (72, 200, 128, Tuning(72, 2, 64, 3, 1)),
    (3, 264, 256, Tuning(8, 4, 64, 2, 3)),
]
LARGE = [
    (1, 3584, 18944),
    (11, 520, 1024),
    (129, 256, 192),
    (300, 1000, 1024),
    (544, 3584, 3584),
    (576, 128, 4096),
    (200, 40, 64),
]


def given_arrays(T: int, O: int, I: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """x and a weight of this type; products are of order 1."""
    rng = np.random.default_rng(T + O)
    x = rng.standard_normal((T, I)).astype(np.float32)
    w = (rng.standard_normal((O, I)) / I**0.5).astype(np.float32)
    return np.asarray(jnp.asarray(x, dtype)), np.asarray(jnp.asarray(w, dtype))


def launched(place: str, x: Any, w: Any, tuning: Tuning | None = None) -> np.ndarray:
    """The kernel's product, with an output that starts as NaN."""
    poison_outputs(place, jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype))
    run = jitted(mosaic_gpu.matmul)
    return np.asarray(run(jnp.asarray(x), jnp.asarray(w), tuning=tuning, **launch_options(place)))


@places
@pytest.mark.parametrize(
    "at", range(5), ids=["whole", "shared", "tokens cut", "outputs cut", "few"]
)
def test_the_product_equals_float64(place: str, at: int) -> None:
    for T, O, I, *sizes in pick(place, [SMALL[at]], [*SMALL, *LARGE][at::5]):
        for dtype in pick(place, ["bfloat16"], ERROR):
            x, w = given_arrays(T, O, I, dtype)
            got = launched(place, x, w, *sizes)
            assert got.shape == (T, O) and got.dtype == x.dtype
            wanted = x.astype(np.float64) @ w.astype(np.float64).T
            assert relative_error(got, wanted) < ERROR[dtype], (T, O, I, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [129, 192, 256, 288, 544, 576])
@pytest.mark.parametrize("product", LAYER_SHAPES)
def test_a_models_shape_equals_the_reference_on_a_card(product: str, rows: int) -> None:
    O, I = LAYER_SHAPES[product]
    x, w = given_arrays(rows, O, I, "bfloat16")
    got = launched(CARD, x, w)
    assert relative_error(got, jax.jit(reference)(x, w)) < 5e-3


def test_shares_are_left_apart_for_their_reader() -> None:
    x, w = map(jnp.asarray, given_arrays(9, 64, 320, "bfloat16"))
    run = jitted(mosaic_gpu.matmul_parts)
    found = run(x, w, tuning=Tuning(16, 1, 64, 2, 2), **launch_options("interpreter"))
    assert isinstance(found, Parts) and found.sums.shape[0] == 2
    assert relative_error(whole(found), reference(x, w)) < 5e-3


def test_the_reference_keeps_the_type_and_is_whole() -> None:
    x, w = map(jnp.asarray, given_arrays(3, 8, 64, "float32"))
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    for found in (reference(x, w), matmul_parts(x, w, backend="reference")):
        assert isinstance(found, jax.Array) and found.dtype == jnp.float32
        assert relative_error(found, wanted) < 1e-6


@settings(max_examples=100)
@given(
    T=st.one_of(st.integers(1, 16), st.integers(129, 576)),
    O=st.integers(1, 5000).map(lambda n: 8 * n),
    I=st.integers(1, 400).map(lambda n: 64 * n),
)
def test_sizes_fit_the_card_and_no_share_waits_for_another(T: int, O: int, I: int) -> None:
    tokens, warpgroups, columns, stages, shares, joined = plan.tuning_of(T, O, I)
    slots = stages * 2 * columns * (tokens + warpgroups * ROWS)
    assert slots + 2 * min(tokens, STAGED) * ROWS * warpgroups <= plan.SHARED_BYTES
    assert stages >= 4 and tokens % 8 == 0 and not joined
    if T > 16:
        assert tokens <= max(most for most, held in plan.TILES if held == warpgroups)
    else:  # one tile of all
        assert (tokens, warpgroups) == (8 if T <= 8 else 16, 4)
    units = -(-O // (warpgroups * ROWS)) * -(-T // tokens)
    assert 1 <= shares <= I // columns
    assert shares == 1 or units * shares <= PROCESSORS


def test_four_tiles_are_taken_where_three_leave_a_quarter_of_the_card_idle() -> None:
    # At 512 tokens, on an H200: 20.8 µs, three tiles of 176 27.8
    tokens, warpgroups, *_, shares, _ = plan.tuning_of(480, 3584, 3584)
    assert (tokens, warpgroups, shares) == (120, 2, 1)


@pytest.mark.parametrize(
    ("rows", "mib", "faster"),
    [
        (128, 32, False),
        (129, 32, True),
        (480, 32, True),
        (481, 32, False),
        (512, 32, False),
        (513, 32, True),
        (576, 32, True),
        (577, 32, False),
        (256, 16, True),
        (256, 15, False),
        (224, 64, True),
        (225, 64, False),
        (513, 64, True),
        (544, 512, True),
        (545, 512, False),
        (224, 160, False),
        (1, 64, True),
        (16, 159, True),
        (17, 64, False),
        (1, 63, False),
        (1, 160, False),
    ],
)
def test_the_kernel_is_taken_within_its_measured_bounds(rows: int, mib: int, faster: bool) -> None:
    assert plan.is_faster(rows, mib << 20) == faster


def test_few_rows_have_as_many_shares_as_the_card_has_processors_for() -> None:
    tokens, warpgroups, *_, shares, _ = plan.tuning_of(1, 3584, 18944)
    assert (tokens, warpgroups, shares) == (8, 4, 9)  # 126 of 132


def test_a_back_end_is_none_where_it_is_slower_refuses_or_is_the_reference() -> None:
    def shape(rows: int, columns: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, columns), jnp.dtype(dtype))

    w = shape(4096, 4096)
    assert find(H200, shape(256, 4096), w) == "mosaic_gpu"
    assert find(H200, shape(64, 4096), w) is None
    assert find(PORTABLE, shape(256, 4096), w) is None
    assert find(H200, shape(256, 4096, "float32"), w) is None
    assert find(H200, shape(256, 4100), shape(4096, 4100)) is None
    assert find(TPU, shape(256, 4096), w) is None
    long = shape(4096, 14336)
    assert find(H200, shape(1, 14336), long) == "mosaic_gpu"


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        (((2, 64), "bfloat16"), ((8, 128), "bfloat16"), r"x \[T, I\]"),
        (((2, 64), "float32"), ((8, 64), "float32"), "bfloat16 or float16"),
        (((2, 64), "float16"), ((8, 64), "bfloat16"), "throughout"),
        (((2, 96), "float16"), ((8, 96), "float16"), "I of 64"),
        (((2, 64), "float16"), ((9, 64), "float16"), "O a multiple of 8"),
        (((0, 64), "float16"), ((8, 64), "float16"), r"x \[T, I\]"),
    ],
)
def test_arrays_that_the_kernel_does_not_take_are_named(x: Any, w: Any, said: str) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in (x, w))
    with pytest.raises(ValueError, match=f"mosaic_gpu matmul takes .*{said}"):
        mosaic_gpu.check(x, w)
