"""Laws of grouped products, the sizes of their kernel, and the oracle of their cases."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.grouped_matmul import (
    BACKENDS,
    Groups,
    choose,
    combine,
    group_tokens,
    grouped_matmul,
    mosaic_gpu,
    tile_for,
)
from pallas_kernels.grouped_matmul.cases import CASES, Case, choices, expected, inputs
from pallas_kernels.grouped_matmul.groups import LARGEST_TILE, SMALLEST_TILE
from pallas_kernels.grouped_matmul.plan import (
    MOST_STAGES,
    ROWS,
    SHARED_BYTES,
    K,
    tuning_of,
    widths_of,
)
from tests.targets import H200

TILES = (8, 16, 32, 64, 128)
EXPERTS, TILE, INPUTS, OUTPUTS = 4, 8, 6, 10
EXPERT = np.array([[0, 2], [2, 3], [2, 0], [3, 2], [0, 3]], np.int32)  # nobody chooses expert 1
group = jax.jit(group_tokens, static_argnums=(1, 2))
grouped = jax.jit(grouped_matmul, static_argnames=("backend", "gating"))
run = functools.partial(grouped, backend="reference")


def gate_alone(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate + 0 * up


def up_alone(gate: jax.Array, up: jax.Array) -> jax.Array:
    return up + 0 * gate


@pytest.fixture(scope="module")
def groups() -> Groups:
    found: Groups = jax.tree.map(np.asarray, group(EXPERT, EXPERTS, TILE))
    return found


@pytest.fixture(scope="module")
def arrays(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(groups.token_P), INPUTS)).astype(np.float32)
    return x, rng.standard_normal((EXPERTS, OUTPUTS, INPUTS)).astype(np.float32)


def owners(groups: Groups) -> np.ndarray:
    """The expert of each row."""
    return np.repeat(groups.expert_W, groups.tile)


def test_each_row_meets_the_weight_of_its_expert(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    wanted = np.einsum("pi,poi->po", x.astype(np.float64), w[owners(groups)])
    np.testing.assert_allclose(run(x, w, groups), wanted, rtol=1e-5, atol=1e-6)


def test_a_weight_changes_rows_of_its_expert_alone(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    other = w.copy()
    other[2] = np.nan
    changed = np.isnan(run(x, other, groups)).all(axis=1)
    np.testing.assert_array_equal(changed, owners(groups) == 2)


def test_a_row_changes_no_other_row(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    dirty = x.copy()
    dirty[3] = np.nan
    got, clean = np.asarray(run(dirty, w, groups)), np.asarray(run(x, w, groups))
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, axis=0), np.delete(clean, 3, axis=0))


def test_rows_of_zero_give_the_bias_of_their_expert(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    bias = np.arange(EXPERTS * OUTPUTS, dtype=np.float32).reshape(EXPERTS, OUTPUTS)
    got = run(np.zeros_like(x), w, groups, bias_EO=bias)
    np.testing.assert_array_equal(got, bias[owners(groups)])


def test_the_gate_is_the_first_half_and_up_the_second(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    plain = run(x, w, groups)
    for gating, half in ((gate_alone, slice(0, 5)), (up_alone, slice(5, 10))):
        np.testing.assert_array_equal(run(x, w, groups, gating=gating), plain[:, half])


def test_the_bias_is_added_before_the_gating(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    bias = np.linspace(-3, 3, EXPERTS * OUTPUTS, dtype=np.float32).reshape(EXPERTS, OUTPUTS)
    got = run(x, w, groups, bias_EO=bias, gating=jnp.maximum)
    plain = np.asarray(run(x, w, groups)) + bias[owners(groups)]
    np.testing.assert_allclose(got, np.maximum(plain[:, :5], plain[:, 5:]), rtol=1e-6)


def test_products_are_summed_in_float32_and_rounded_once(groups: Groups) -> None:
    ones = jnp.ones((len(groups.token_P), 300), jnp.bfloat16)
    got = run(ones, jnp.ones((EXPERTS, 2, 300), jnp.bfloat16), groups)
    assert got.dtype == jnp.bfloat16
    assert np.all(np.asarray(got, np.float32) == 300), "sums in bfloat16 end at 256"


def test_products_are_linear_in_the_rows(groups: Groups, arrays: tuple) -> None:
    x, w = arrays
    np.testing.assert_array_equal(run(4 * x, w, groups), 4 * run(x, w, groups))


def test_a_token_gets_its_rows_times_their_weights(groups: Groups) -> None:
    y = np.random.default_rng(1).standard_normal((len(groups.token_P), 3)).astype(np.float32)
    weight = np.random.default_rng(2).random(EXPERT.shape).astype(np.float32)
    wanted = sum(y[groups.place_TK[:, k]] * weight[:, k, None] for k in range(2))
    np.testing.assert_allclose(combine(jnp.asarray(y), groups, weight), wanted, rtol=1e-6)
    first = np.array([[1, 0]] * len(EXPERT), np.float32)
    np.testing.assert_array_equal(combine(jnp.asarray(y), groups, first), y[groups.place_TK[:, 0]])


def test_weighted_rows_are_summed_before_they_are_rounded(groups: Groups) -> None:
    y = jnp.zeros((len(groups.token_P), 1), jnp.bfloat16)
    y = y.at[groups.place_TK[0]].set(jnp.array([[256.0], [1.0]], jnp.bfloat16))
    got = combine(y, groups, np.array([[1, 3]] * len(EXPERT), np.float32))
    assert got.dtype == jnp.bfloat16 and float(got[0, 0]) == 260  # 259 rounds to 260 at once


def test_arrays_of_groups_are_int32_and_rows_of_nobody_name_token_0(groups: Groups) -> None:
    assert groups.own_TK is None  # one device has all experts
    assert {array.dtype for array in groups[:-1]} == {np.dtype(np.int32)}
    nobody = np.setdiff1d(np.arange(len(groups.token_P)), groups.place_TK)
    assert len(nobody) and not groups.token_P[nobody].any()


def test_an_expert_that_nobody_chose_has_no_tile_in_use(groups: Groups) -> None:
    assert 1 not in groups.expert_W[groups.rows_W > 0]
    assert groups.rows_W[groups.rows_W > 0].tolist() == [3, 4, 3]


def test_choices_in_another_order_have_the_same_places(groups: Groups) -> None:
    other = group(EXPERT[:, ::-1], EXPERTS, TILE)
    np.testing.assert_array_equal(other.place_TK, groups.place_TK[:, ::-1])
    np.testing.assert_array_equal(other.token_P, groups.token_P)


def test_one_favourite_fills_its_tiles_from_the_first() -> None:
    found = group(np.full((20, 1), 3, np.int32), EXPERTS, TILE)
    assert found.rows_W.tolist() == [8, 8, 4, 0, 0, 0]
    assert found.place_TK[:, 0].tolist() == list(range(20))
    assert found.used[-1] == 3 and found.expert_W[:3].tolist() == [3, 3, 3]


@given(experts=st.integers(1, 300), chosen=st.integers(1, 12), tokens=st.integers(1, 4000))
def test_more_tokens_never_have_smaller_tiles(experts: int, chosen: int, tokens: int) -> None:
    chosen = min(chosen, experts)
    assert tile_for(tokens, chosen, experts) <= tile_for(tokens + 1, chosen, experts)


@given(experts=st.integers(1, 300), chosen=st.integers(1, 12), tokens=st.integers(1, 4000))
def test_a_tile_holds_the_mean_share_unless_it_is_the_largest(
    experts: int, chosen: int, tokens: int
) -> None:
    chosen = min(chosen, experts)
    tile = tile_for(tokens, chosen, experts)
    assert tile == LARGEST_TILE or tile >= tokens * chosen / experts
    assert tile >= SMALLEST_TILE


@pytest.mark.parametrize("tile", TILES)
def test_widths_of_a_tile_ascend_to_it_in_rows_of_eight(tile: int) -> None:
    widths = widths_of(tile)
    assert list(widths) == sorted(widths) and widths[-1] == tile
    assert all(width % 8 == 0 for width in widths) and widths[0] == max(8, tile // 4)


@pytest.mark.parametrize("tile", TILES)
def test_the_ring_is_as_deep_as_it_may_be(tile: int) -> None:
    sizes = tuning_of(tile)
    slot = (2 * sizes.warpgroups * ROWS + tile) * K * 2
    staged = sizes.warpgroups * tile * ROWS * 2
    deeper = (sizes.stages + 1) * slot + staged
    assert sizes.stages == MOST_STAGES or deeper > SHARED_BYTES
    assert sizes.warpgroups == (2 if tile == LARGEST_TILE else 1)


def spec_of(outputs: int, gating: Any, tile: int = 16) -> Any:
    sizes = {"tiles": 3, "tile": tile, "rows": None, "shared": False, "O": outputs, "I": 128}
    return mosaic_gpu.Spec(
        **sizes, gating=gating, dtype=jnp.bfloat16, tuning=tuning_of(tile), interpret=None
    )


@pytest.mark.parametrize("outputs", [64, 128, 192, 1536])
@pytest.mark.parametrize("tile", [16, 128])
def test_units_of_a_tile_cover_all_columns(outputs: int, tile: int) -> None:
    plain, gated = spec_of(outputs, None, tile), spec_of(2 * outputs, gate_alone, tile)
    assert plain.F == gated.F == outputs
    for spec in (plain, gated):
        assert (spec.across - 1) * spec.width < outputs <= spec.across * spec.width
    assert plain.width == 2 * gated.width == 2 * plain.half, "gate and up fill both halves"


def test_the_kernel_is_chosen_for_what_it_takes_and_nothing_else() -> None:
    groups = group(EXPERT, EXPERTS, TILE)
    x, w = jnp.zeros((len(groups.token_P), 64), jnp.bfloat16), jnp.zeros((4, 128, 64), jnp.bfloat16)
    assert choose(H200, x, w, groups, gate_alone) == "mosaic_gpu"
    assert choose(H200, x, w[:, :64], groups, gate_alone) == "reference"
    assert choose(H200, x, w[:, :64], groups, None) == "mosaic_gpu"
    assert choose(H200, x.astype("float32"), w, groups, None) == "reference"
    exact = functools.partial(jax.nn.gelu, approximate=False)
    assert not BACKENDS.supports("mosaic_gpu", x, w, groups, lambda g, u: exact(g) * u)
    assert BACKENDS.supports("mosaic_gpu", x, w, groups, lambda g, u: jax.nn.gelu(g) * u)


def test_an_unknown_back_end_is_named_with_those_that_exist(groups: Groups, arrays: tuple) -> None:
    with pytest.raises(UnknownBackend, match="grouped_matmul has no back end 'cutlass'"):
        grouped_matmul(*arrays, groups, backend="cutlass")


@settings(max_examples=25)
@given(tokens=st.integers(1, 30), experts=st.integers(1, 20), skew=st.floats(0, 6), data=st.data())
def test_drawn_choices_are_different_experts(
    tokens: int, experts: int, skew: float, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(1, experts))
    made = choices(tokens, experts, chosen, skew, np.random.default_rng(0))
    assert made.shape == (tokens, chosen) and made.dtype == np.int32
    assert all(len(set(row)) == chosen and set(row) <= set(range(experts)) for row in made.tolist())


def test_skewed_choices_have_a_favourite_and_others_have_none() -> None:
    rng = np.random.default_rng(0)
    even, skewed = (choices(2000, 8, 1, skew, rng)[:, 0] for skew in (0.0, 3.0))
    assert np.bincount(even, minlength=8).max() < 320  # 250 each, within five deviations
    assert np.bincount(skewed, minlength=8).max() > 1500


def test_cases_have_names_of_their_own_and_weights_of_sum_one() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES[:5]:
        made = inputs(case)
        np.testing.assert_allclose(made.weight.sum(axis=1), 1, rtol=1e-5)
        assert made.gate_up.shape == (case.experts, 2 * case.inner, case.width)
        assert made.down.shape == (case.experts, case.width, case.inner)


def test_the_oracle_is_linear_in_down_and_odd_in_up() -> None:
    made = inputs(Case(name="", tokens=3, experts=3, choices=2, width=4, inner=5))
    out = expected(made)
    np.testing.assert_allclose(expected(made._replace(down=2 * made.down)), 2 * out)
    odd = made.gate_up.copy()
    odd[:, 5:] *= -1
    np.testing.assert_allclose(expected(made._replace(gate_up=odd)), -out)
    dead = made._replace(gate_up=np.zeros_like(made.gate_up))
    assert not expected(dead).any() and expected(dead, bias=1.0).any()
