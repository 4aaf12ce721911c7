"""The activation of few tokens' products, added up and rounded in one launch, in the interpreter
and on a card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import GELU, SILU
from pallas_kernels.gated_matmul.cases import ACTIVATIONS
from pallas_kernels.parts import Parts, Product, whole
from pallas_kernels.scaled_matmul import Rounding, choose_gated_rows, gated_rows, mosaic_gating_few
from tests.pallas_kernels.places import launch_options, pick, places
from tests.targets import H200

FP8 = jnp.float8_e4m3fn
BF16 = jnp.dtype(jnp.bfloat16)


def product_of(tokens: int, width: int, cut: int, shares: int) -> Product:
    """Random gates and ups, `cut` columns of which are done; row 1 has gates of zero. What no
    product has is NaN."""
    rng = np.random.default_rng(cut + width)
    y = rng.standard_normal((tokens, 2 * width)) * 3
    y[1:2, :width] = 0
    done = jnp.asarray(y, BF16)
    if cut == 2 * width:
        return done
    parts = rng.standard_normal((shares, tokens, 2 * width - cut)) * (y[:, cut:] != 0)
    rest = np.full((shares, tokens + 3, 2 * width - cut + 256), np.nan)
    rest[:, :tokens, : 2 * width - cut] = parts
    sums = jnp.asarray(rest, jnp.float32)
    held = None if cut == 0 else done.at[:, cut:].set(jnp.nan)
    return Parts(sums, (), (tokens, 2 * width), BF16, held, cut)


@places
@pytest.mark.parametrize(
    "kind",
    ["both", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("done", "shares"))],
)
def test_few_rows_are_gated_and_rounded_once_more(place: str, kind: str) -> None:
    gating = GELU if kind == "shares" else SILU
    tokens, width, shares = pick(place, (2, 1536, 2), (64, 18944, 7))
    cut = {"done": 2 * width, "shares": 0, "both": pick(place, 2560, 33792)}[kind]
    product, rounding = product_of(tokens, width, cut, shares), Rounding(FP8, max(8, tokens))
    assert mosaic_gating_few.supports(product, rounding)
    run = functools.partial(
        mosaic_gating_few.gated_rows,
        rounding=rounding,
        gating=gating,
        **launch_options(place),
    )
    rows = jax.jit(run)(product).sized(tokens)
    numbers, scale = np.asarray(rows.numbers, np.float32), np.asarray(rows.scale)
    gate, up = np.split(np.asarray(whole(product), np.float64), 2, axis=1)
    wanted = ACTIVATIONS[gating](gate) * up
    assert rows.shape == (tokens, width) and rows.dtype == BF16
    assert (numbers[1] == 0).all() and scale[1] == 1
    # Numbers of 8 bits have four bits of precision, and steps of 2^-9 at the least
    step = 2.0**-4 * np.abs(wanted) + scale[:, None] * 2.0**-10
    wrong = ~(np.abs(numbers * scale[:, None] - wanted) <= 1.1 * step)
    assert not wrong.any(), (wrong.sum(), np.argwhere(wrong)[:4].tolist())
    largest = np.abs(wanted[[0, *range(2, tokens)]]).max(axis=1)
    np.testing.assert_allclose(scale[[0, *range(2, tokens)]], largest / 448, rtol=2**-7)


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_row_over_several_blocks_lowers_for_cuda_as_one_launch(blocks: int) -> None:
    run = functools.partial(
        mosaic_gating_few.gated_rows, rounding=Rounding(FP8, 8), gating=SILU, blocks=blocks
    )
    traced = jax.jit(run).trace(product_of(2, 512, 0, 2))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "cut"), [(18944, 33792), (18944, 0), (512, 0)])
def test_a_row_over_several_blocks_has_the_bits_of_one_block_on_a_card(
    width: int, cut: int
) -> None:
    for tokens, blocks in (1, 8), (33, 4), (64, 2):
        product, rounding = product_of(tokens, width, cut, 7), Rounding(FP8, max(8, tokens))
        run = functools.partial(mosaic_gating_few.gated_rows, rounding=rounding, gating=SILU)
        alone, together = (jax.jit(functools.partial(run, blocks=own)) for own in (1, blocks))
        wanted = alone(product).sized(tokens)
        for _ in range(50):
            found = together(product).sized(tokens)
            for one, two in (found.numbers, wanted.numbers), (found.scale, wanted.scale):
                np.testing.assert_array_equal(*(np.asarray(y).view(np.uint8) for y in (one, two)))


def test_products_of_few_tokens_that_the_kernel_takes() -> None:
    def taken(tokens: int = 1, width: int = 512, cut: int = 0, dtype: str = "float8_e4m3fn"):  # type: ignore[no-untyped-def]
        sums = jax.ShapeDtypeStruct((2, 8, 2 * width - cut), jnp.float32)
        done = jax.ShapeDtypeStruct((tokens, 2 * width), BF16) if cut else None
        parts = Parts(sums, (), (tokens, 2 * width), BF16, done, cut)  # type: ignore[arg-type]
        return mosaic_gating_few.supports(parts, Rounding(dtype, 8))

    assert taken() and taken(64) and taken(width=28672) and taken(width=18944, cut=33792)
    assert not taken(65) and not taken(width=384) and not taken(dtype="int8")
    assert not taken(width=1024, cut=512)  # gates are neither done nor shares
    assert not taken(width=1024, cut=1280)


def test_few_rows_that_the_kernel_does_not_take_stay_plain() -> None:
    product = jnp.ones((2, 200), jnp.bfloat16)
    rounding = Rounding(FP8, 8)
    backend = choose_gated_rows(H200, product, rounding, SILU)
    found = gated_rows(product, rounding, gating=SILU, backend=backend)
    assert isinstance(found, jax.Array) and found.dtype == BF16
    np.testing.assert_allclose(np.asarray(found, np.float32), 0.7310586, rtol=2**-7)
