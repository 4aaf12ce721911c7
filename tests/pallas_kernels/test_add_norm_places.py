"""Residual sum and norm in the interpreter and on a card, against float64 and the reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.add_norm import add_norm, mosaic_few, mosaic_gpu, rms_norm
from pallas_kernels.add_norm.cases import CASES, Case, expected, inputs
from pallas_kernels.add_norm.mosaic_norm import Delta
from pallas_kernels.parts import NormedRows, Parts, WeightedRows
from pallas_kernels.scaled_matmul import Rounding, mosaic_rounding
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    shape_of,
    slow_places,
)

ULP = {"bfloat16": 2**-8, "float16": 2**-10}
reference = jax.jit(functools.partial(add_norm, backend="reference"), static_argnames="eps")
widths = pytest.mark.parametrize("width", [128, 384, 896, 3584])


def arguments(case: Case, dtype: str, seed: int = 0) -> tuple[Any, Any, Any]:
    given = inputs(case, seed)
    return tuple(jnp.asarray(x, dtype) for x in (given.x, given.delta, given.weight))  # type: ignore[return-value]


def launched(place: str, given: tuple[Any, Any, Any], eps: float = 1e-6) -> tuple[Any, Any]:
    """Sum and norm of the kernel as numpy arrays, with outputs that start as NaN."""
    poison_outputs(place, shape_of(given[0]), shape_of(given[0]))
    total, norm = jitted(mosaic_gpu.add_norm)(*given, eps=eps, **launch_options(place))
    return np.asarray(total), np.asarray(norm)


def assert_right(case: Case, dtype: str, given: tuple[Any, ...], got: tuple[Any, Any]) -> None:
    total, norm = expected(case, *(np.asarray(x) for x in given))
    np.testing.assert_array_equal(got[0].astype(np.float64), total)
    np.testing.assert_allclose(got[1].astype(np.float64), norm, rtol=ULP[dtype], atol=1e-6)


@places
@pytest.mark.parametrize("dtype", ULP)
def test_random_rows_equal_float64_up_to_one_rounding(place: str, dtype: str) -> None:
    for case in pick(place, [Case(name="two rows", rows=2, width=384)], CASES):
        for seed in pick(place, (7,), (1, 2, 3)):
            given = arguments(case, dtype, seed)
            assert_right(case, dtype, given, launched(place, given, case.eps))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 131, 132, 133, 255, 256])
@pytest.mark.parametrize("width", [128, 896, 1024, 3584, 4096, 8192, 16384])
def test_every_number_of_rows_equals_float64_on_a_card(rows: int, width: int) -> None:
    case = Case(name="", rows=rows, width=width)
    given = arguments(case, "bfloat16")
    assert_right(case, "bfloat16", given, launched(CARD, given))


@places
@pytest.mark.parametrize("dtype", ULP)
def test_the_kernel_is_within_a_rounding_of_the_reference(place: str, dtype: str) -> None:
    case = Case(name="", rows=pick(place, 2, 256), width=pick(place, 256, 4096), growth=0)
    given = arguments(case, dtype, seed=4)
    total, norm = launched(place, given)
    wanted_total, wanted_norm = (np.asarray(x) for x in reference(*given, eps=1e-6))
    np.testing.assert_array_equal(total, wanted_total)
    np.testing.assert_allclose(
        norm.astype(np.float32), wanted_norm.astype(np.float32), rtol=2 * ULP[dtype], atol=1e-6
    )


@places
def test_a_row_of_nan_stays_in_its_row(place: str) -> None:
    case = Case(name="", rows=3, width=pick(place, 128, 3584))
    x, delta, weight = arguments(case, "bfloat16", seed=5)
    clean = launched(place, (x, delta, weight))
    dirty = launched(place, (x.at[1, 77].set(jnp.nan), delta, weight))
    for before, after in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert np.isnan(dirty[0][1, 77]) and np.isnan(dirty[1][1].astype(np.float32)).all()


@places
def test_a_row_gives_the_same_bits_in_any_batch_and_again(place: str) -> None:
    case = Case(name="", rows=pick(place, 3, 256), width=pick(place, 128, 3584))
    x, delta, weight = arguments(case, "bfloat16", seed=6)
    together = launched(place, (x, delta, weight))
    for _ in range(pick(place, 1, 5)):
        for one, two in zip(launched(place, (x, delta, weight)), together, strict=True):
            np.testing.assert_array_equal(one, two)
    for one, two in zip(launched(place, (x[2:3], delta[2:3], weight)), together, strict=True):
        np.testing.assert_array_equal(one[0], two[2])


@places
@pytest.mark.parametrize("dtype", ULP)
def test_a_rounded_norm_has_the_bits_of_the_norm_rounded_by_itself(place: str, dtype: str) -> None:
    rows, width, growth = pick(place, (3, 384, 1), (256, 3584, 1 / 32))  # finite in every type
    case = Case(name="", rows=rows, width=width, growth=growth)
    x, delta, weight = arguments(case, dtype, seed=9)
    given = x.at[1].set(0), delta.at[1].set(0), weight
    rounding = Rounding(jnp.float8_e4m3fn, case.rows + 5)
    options = launch_options(place)
    total, plain = jitted(mosaic_gpu.add_norm)(*given, eps=1e-6, **options)
    wanted = jitted(mosaic_rounding.rounded_rows)(plain, **options)
    found_total, found = jitted(mosaic_gpu.add_norm)(*given, eps=1e-6, rounding=rounding, **options)
    assert found.shape == plain.shape and found.dtype == dtype
    assert found.numbers.shape == (case.rows + 5, case.width) and found.scale.shape == (
        case.rows + 5,
    )
    held = found.sized(case.rows)
    for name, one, two in (
        ("total", found_total, total),
        ("numbers", held.numbers, wanted.numbers),
        ("scale", held.scale, wanted.scale),
    ):
        one, two = np.asarray(one, np.float32), np.asarray(two, np.float32)
        assert np.isfinite(two).all(), name
        np.testing.assert_array_equal(one, two, err_msg=name)


@places
@pytest.mark.parametrize("scaled", [False, True], ids=["shares", "scales"])
def test_parts_are_added_to_the_bits_of_their_sum(place: str, scaled: bool) -> None:
    small = Case(name="", rows=2, width=384 if scaled else 1536)
    case = pick(place, small, Case(name="", rows=200, width=3584))
    x, delta, weight = arguments(case, "bfloat16", seed=10)
    rng, shares = np.random.default_rng(0), 1 if scaled else 3
    # Rows and columns that no product has follow it
    shape = shares, case.rows + 6, case.width + (0 if scaled else 128)
    sums = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16 if scaled else jnp.float32)
    of_rows, of_columns = (
        jnp.asarray(rng.uniform(0.1, 2, size), jnp.float32) for size in (shape[1], case.width)
    )
    scales = (of_rows, of_columns) if scaled else ()
    parts = Parts(sums, scales, delta.shape, delta.dtype)
    whole = np.zeros((case.rows, case.width), np.float32)
    for share in np.asarray(sums, np.float32):
        whole += share[: case.rows, : case.width]
    if scaled:
        whole = whole * np.asarray(of_rows)[: case.rows, None] * np.asarray(of_columns)
    whole = jnp.asarray(whole).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(parts.whole), np.asarray(whole))
    for one, two in zip(
        launched(place, (x, parts, weight)), launched(place, (x, whole, weight)), strict=True
    ):
        np.testing.assert_array_equal(one, two)


@places
@pytest.mark.parametrize("weights", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_rows_are_normed_before_they_are_added(place: str, weights: Any) -> None:
    case = pick(place, Case(name="", rows=2, width=384), Case(name="", rows=200, width=3584))
    x, delta, weight = arguments(case, "bfloat16", seed=12)
    own = jnp.flip(weight).astype(weights)
    found = launched(place, (x, NormedRows(delta, own, 1e-3), weight))
    wanted = launched(place, (x, rms_norm(delta, own, 1e-3), weight))
    for one, two in zip(found, wanted, strict=True):
        one, two = one.astype(np.float64), two.astype(np.float64)
        # The norms are added up in other orders
        np.testing.assert_allclose(one, two, rtol=2 * ULP["bfloat16"], atol=2e-2)
        assert np.linalg.norm(one - two) < 1e-3 * np.linalg.norm(two)


@slow_places
@pytest.mark.parametrize(("width", "shares"), [(3584, 9), (1024, 16), (4608, 4)])
def test_a_team_gives_the_bits_of_one_warpgroup(place: str, width: int, shares: int) -> None:
    for rows, blocks in pick(place, [(2, 1)], [(1, 8), (33, 4), (64, 2)]):
        x, _, weight = arguments(Case(name="", rows=rows, width=width), "bfloat16", seed=11)
        sums = np.random.default_rng(width).standard_normal((shares, rows + 7, width + 256))
        parts = Parts(jnp.asarray(sums, jnp.float32), (), (rows, width), x.dtype)
        rounding, options = Rounding(jnp.float8_e4m3fn, rows + 7), launch_options(place)
        alone = functools.partial(mosaic_gpu.add_norm, eps=1e-6, rounding=rounding, **options)
        total, wanted = jax.jit(alone)(x, parts.whole, weight)
        team = functools.partial(as_team, eps=1e-6, rounding=rounding, blocks=blocks, **options)
        run = jax.jit(team)
        for _ in range(pick(place, 1, 50)):
            found_total, found = run(x, parts, weight)
            for one, two in (
                (found_total, total),
                (found.numbers[:rows], wanted.numbers[:rows]),
                (found.scale[:rows], wanted.scale[:rows]),
            ):
                np.testing.assert_array_equal(*(np.asarray(y).view(np.uint8) for y in (one, two)))


def as_team(
    x: Any, parts: Parts, weight: Any, *, interpret: Any = None, **options: Any
) -> tuple[Any, Any]:
    return mosaic_few.add_norm(x, Delta.of(parts), weight, interpret=interpret, **options)


def test_a_team_lowers_for_cuda_as_one_launch() -> None:
    x, _, weight = arguments(Case(name="", rows=2, width=512), "bfloat16")
    parts = Parts(jnp.ones((2, 2, 512)), (), x.shape, x.dtype)
    run = functools.partial(as_team, eps=1e-6, rounding=None, blocks=8)
    text = jax.jit(run).trace(x, parts, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_few_rows_of_few_shares_have_a_team_each() -> None:
    def taken(rows: int = 1, width: int = 3584, shares: int = 9, done: bool = False) -> bool:
        sums = jax.ShapeDtypeStruct((shares, 64, width), jnp.float32)
        held = jax.ShapeDtypeStruct((64, width), jnp.bfloat16) if done else None
        return mosaic_few.takes(Parts(sums, (), (rows, width), jnp.bfloat16, held))  # type: ignore[arg-type]

    assert taken() and taken(66) and taken(width=8192) and taken(33, 1024, 33)
    assert not taken(67) and not taken(width=896) and not taken(shares=1) and not taken(done=True)
    assert not taken(64, shares=30) and not taken(width=16384)  # registers would not do
    assert not mosaic_few.takes(jnp.ones((1, 3584), jnp.bfloat16))


@places
def test_inputs_are_left_as_they_were(place: str) -> None:
    given = arguments(CASES[2], "bfloat16", seed=8)
    before = [np.asarray(x).copy() for x in given]
    launched(place, given)
    for x, wanted in zip(given, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), wanted)


@places
@pytest.mark.parametrize("dtype", ULP)
def test_rows_are_added_up_with_their_weights_and_rounded_once(place: str, dtype: str) -> None:
    tokens, choices, width = pick(place, (2, 3, 256), (256, 8, 2048))
    rng = np.random.default_rng(9)
    place_TK = rng.permutation(tokens * choices + 5)[: tokens * choices].reshape(tokens, choices)
    y_PD = np.full((tokens * choices + 5, width), np.nan)  # where no token reads
    y_PD[place_TK] = rng.standard_normal((tokens, choices, width))
    weight_TK = jnp.asarray(rng.uniform(0.1, 1, place_TK.shape), jnp.float32)
    rows = WeightedRows(jnp.asarray(y_PD, dtype), jnp.asarray(place_TK, jnp.int32), weight_TK)
    x, _, weight = arguments(Case(name="", rows=tokens, width=width), dtype)
    total, norm = (np.float64(y) for y in launched(place, (x, rows, weight)))
    delta = np.einsum("tkd,tk->td", np.float64(rows.y_PD)[place_TK], np.float64(weight_TK))
    np.testing.assert_allclose(total, np.float64(x) + delta, rtol=ULP[dtype], atol=1e-5)
    rms = np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm, total / rms * np.float64(weight), rtol=ULP[dtype], atol=1e-6)


@widths
@given(
    seed=st.integers(0, 2**31), size=st.integers(-12, 12), eps=st.sampled_from([1e-6, 1e-5, 0.5])
)
@settings(max_examples=10)
def test_the_norm_has_the_weights_rms_where_eps_is_small(
    width: int, seed: int, size: int, eps: float
) -> None:
    """rms_norm(x) = x / sqrt(mean(x²) + eps) · weight."""
    x = np.random.default_rng(seed).standard_normal((2, width)).astype(np.float32)
    x *= np.float32(2.0**size)
    got = np.asarray(jitted_norm(x, np.ones(width, np.float32), eps), np.float64)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


jitted_norm = jax.jit(rms_norm, static_argnums=2)


def test_the_norm_is_of_the_rounded_sum() -> None:
    """1 + 2^-9 rounds to 1 in bfloat16, so that the row's norm is that of a row of ones."""
    x = jnp.ones((1, 128), jnp.bfloat16)
    delta = jnp.full((1, 128), 2.0**-9, jnp.bfloat16)
    weight = jnp.ones(128, jnp.bfloat16)
    total, norm = jitted(mosaic_gpu.add_norm)(
        x, delta, weight, eps=0.0, **launch_options("interpreter")
    )
    assert (np.asarray(total, np.float32) == 1).all()
    assert (np.asarray(norm, np.float32) == 1).all()


def test_the_reference_is_differentiable() -> None:
    x, delta = (jnp.asarray(a, jnp.float32) for a in arguments(CASES[2], "float32")[:2])
    weight = jnp.ones(x.shape[1])
    loss = lambda x: sum(y.sum() for y in add_norm(x, delta, weight, 1e-6, backend="reference"))
    direction = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
    step = 1e-2
    slope = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(
        float((jax.grad(loss)(x) * direction).sum()), float(slope), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize(
    ("shapes", "types", "message"),
    [
        (((2, 128), (2, 128), (128,)), ("bfloat16", "bfloat16", "float16"), "weight float16"),
        (((2, 128), (2, 128), (128,)), ("bfloat16", "float16", "bfloat16"), r"delta float16\["),
        (((2, 128), (2, 256), (128,)), ("bfloat16",) * 3, r"delta bfloat16\[2, 256\]"),
        (((2, 128), (2, 128), (64,)), ("bfloat16",) * 3, r"weight \[64\]"),
        (((2, 100), (2, 100), (100,)), ("bfloat16",) * 3, "multiple of 128 up to 16384, got 100"),
        (((257, 128), (257, 128), (128,)), ("float16",) * 3, "1 to 256 rows, got 257"),
    ],
)
def test_a_refusal_names_what_was_given(
    shapes: tuple[tuple[int, ...], ...], types: tuple[str, ...], message: str
) -> None:
    given = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    with pytest.raises(ValueError, match=f"mosaic_gpu add_norm takes .*{message}"):
        mosaic_gpu.add_norm(*given, 1e-6)
