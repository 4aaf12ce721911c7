"""The activation of products with scales, rounded in one launch, in the interpreter and on a
card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import GELU, SILU
from pallas_kernels.gated_matmul.cases import ACTIVATIONS
from pallas_kernels.parts import Parts
from pallas_kernels.scaled_matmul import Rounding, mosaic_gating, mosaic_gating_ring
from tests.pallas_kernels.places import launch_options, pick, places


@places
@pytest.mark.parametrize(
    ("sharing", "width"),
    [(1, 384), (1024, 384), (1, 2304), (1024, 2304), (1, 2560)],
    ids=["two rows", "a row", "wide, two rows", "wide, a row", "a ring of rows"],
)
def test_rows_are_gated_and_rounded_once_more(
    place: str, sharing: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gating, "SHARING", sharing)
    monkeypatch.setattr(mosaic_gating_ring, "PROCESSORS", 1)  # which wraps around the ring
    gating = GELU if width == 384 else SILU
    width = pick(place, 2560, 18944) if width == 2560 else width
    rng, tokens = np.random.default_rng(0), pick(place, 3, 257)
    sums = jnp.asarray(rng.standard_normal((1, tokens, 2 * width)) * 40, jnp.bfloat16)
    sums = sums.at[0, 1, :width].set(0)
    scales = tuple(jnp.asarray(rng.uniform(0.02, 0.3, n), jnp.float32) for n in (tokens, 2 * width))

    def run(kept: slice) -> tuple[np.ndarray, np.ndarray]:
        own = sums[:, kept], (scales[0][kept], scales[1])
        product = Parts(*own, (own[0].shape[1], 2 * width), jnp.dtype(jnp.bfloat16))
        rounding = Rounding(jnp.float8_e4m3fn, len(own[1][0]))
        assert mosaic_gating.supports(product, rounding)
        gate = functools.partial(
            mosaic_gating.gated_rows,
            rounding=rounding,
            gating=gating,
            **launch_options(place),
        )
        rows = jax.jit(gate)(product)
        return np.asarray(rows.numbers, np.float32), np.asarray(rows.scale)

    numbers, scale = run(slice(None))
    product = Parts(sums, scales, (tokens, 2 * width), jnp.dtype(jnp.bfloat16)).whole
    gate, up = np.split(np.asarray(product, np.float64), 2, axis=1)
    wanted = ACTIVATIONS[gating](gate) * up
    assert (numbers[1] == 0).all() and scale[1] == 1
    # Numbers of 8 bits have four bits of precision, and steps of 2^-9 at the least
    step = 2.0**-4 * np.abs(wanted) + scale[:, None] * 2.0**-10
    assert (np.abs(numbers * scale[:, None] - wanted) <= 1.1 * step).all()
    np.testing.assert_allclose(scale[2], np.abs(wanted[2]).max() / 448, rtol=2**-7)
    for one, two in zip(run(slice(2, 3)), (numbers[2:3], scale[2:3]), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("width", "warpgroups"), [(512, 4), (14336, 4), (16384, 4), (18944, 3), (20480, 2)]
)
def test_rings_of_rows_fit_a_processor(width: int, warpgroups: int) -> None:
    sums = jax.ShapeDtypeStruct((1, 9200, 2 * width), jnp.bfloat16)
    ones = (jax.ShapeDtypeStruct((2,), jnp.float32),) * 2
    assert mosaic_gating_ring.takes(Parts(sums, ones, sums.shape[1:], sums.dtype))  # type: ignore[arg-type]
    spec = mosaic_gating_ring._Spec(9200, width, sums.dtype, SILU, None)
    assert spec.groups == warpgroups
    assert 2 <= spec.slots and spec.slots * 4 * width + 2048 <= 227 * 1024


@pytest.mark.parametrize(
    ("width", "dtype"), [(2304, "bfloat16"), (21504, "bfloat16"), (512, "float32")]
)
def test_rows_that_no_ring_takes(width: int, dtype: str) -> None:
    sums = jax.ShapeDtypeStruct((1, 2, 2 * width), dtype)
    ones = (jax.ShapeDtypeStruct((2,), jnp.float32),) * 2
    product = Parts(sums, ones, (2, 2 * width), jnp.dtype("bfloat16"))  # type: ignore[arg-type]
    assert not mosaic_gating_ring.takes(product)


def test_products_that_the_gating_kernel_takes() -> None:
    def taken(width: int = 128, shares: int = 1, scaled: bool = True, dtype: str = "int8") -> bool:
        sums = jax.ShapeDtypeStruct((shares, 2, 2 * width), jnp.bfloat16)
        ones = (jax.ShapeDtypeStruct((2,), jnp.float32),) * 2
        product = Parts(sums, ones if scaled else (), (2, 2 * width), jnp.dtype(jnp.bfloat16))  # type: ignore[arg-type]
        return mosaic_gating.supports(product, Rounding(dtype, 2))

    fp8 = "float8_e4m3fn"
    assert taken(dtype=fp8) and taken(28672, dtype=fp8)
    assert not taken() and not taken(100, dtype=fp8) and not taken(28800, dtype=fp8)
    assert not taken(shares=2, dtype=fp8) and not taken(scaled=False, dtype=fp8)
    assert not mosaic_gating.supports(jnp.ones((2, 256), jnp.bfloat16), Rounding(fp8, 2))
