"""Tokens sorted by expert, and the grouped products of the reference against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import (
    BACKENDS,
    Groups,
    choose,
    combine,
    group_tokens,
    grouped_matmul,
    own_groups,
    tile_for,
)
from pallas_kernels.grouped_matmul import group as grouping
from pallas_kernels.grouped_matmul import groups as sorting
from pallas_kernels.grouped_matmul.cases import CASES, Case, Inputs, choices, expected, inputs
from pallas_kernels.grouped_matmul.groups import (
    LARGEST_TILE,
    MOST_SHARED,
    share_tokens,
    tiles_of,
)
from pallas_kernels.target import PORTABLE
from tests.pallas_kernels.places import relative_error
from tests.targets import H200

group = jax.jit(group_tokens, static_argnums=(1, 2))
share = jax.jit(share_tokens, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def feed_forward(given: Inputs, tile: int | None) -> jax.Array:
    """The routed feed-forward by the op, with tiles of that height or as a step chooses them."""
    experts = given.gate_up.shape[0]
    if tile is None:
        groups = grouping(given.expert, experts)
    else:
        groups = group_tokens(given.expert, experts, tile)
    product = functools.partial(grouped_matmul, groups=groups, backend="reference")
    hidden = product(groups.rows_of(given.x), given.gate_up, gating=SILU)
    return combine(product(hidden, given.down), groups, given.weight)


def drawn(seed: int, tokens: int, experts: int, chosen: int, skew: float) -> np.ndarray:
    return choices(tokens, experts, chosen, skew, np.random.default_rng(seed))


@st.composite
def any_choices(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Choices of some tokens, the number of experts and a tile. Few shapes: each compiles."""
    tokens, experts, chosen = draw(st.sampled_from([(1, 4, 2), (9, 4, 4), (40, 16, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    skew = draw(st.sampled_from([0.0, 1.0, 5.0]))
    return choices(tokens, experts, chosen, skew, rng), experts, draw(st.sampled_from([8, 16]))


@settings(max_examples=60, deadline=None)
@given(any_choices())
def test_every_choice_has_a_row_of_its_own_in_a_tile_of_its_expert(
    made: tuple[np.ndarray, int, int],
) -> None:
    expert, experts, tile = made
    found: Groups = jax.tree.map(np.asarray, group(expert, experts, tile))
    assert found.tile == tile
    place = found.place_TK
    assert len(np.unique(place)) == place.size
    np.testing.assert_array_equal(found.expert_W[place // tile], expert)
    assert (place % tile < found.rows_W[place // tile]).all()
    tokens = np.broadcast_to(np.arange(len(expert))[:, None], expert.shape)
    np.testing.assert_array_equal(found.token_P[place], tokens)
    assert found.rows_W.sum() == expert.size, "a tile claims rows that nobody takes"
    assert (np.diff(np.flatnonzero(found.rows_W)) == 1).all() and found.rows_W[0]
    used = found.expert_W[found.rows_W > 0]
    assert found.used[-1] == len(used)
    assert (np.diff(used) >= 0).all(), "tiles of an expert are neighbours"


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.sampled_from([(1, 40, 3), (8, 33, 33), (9, 300, 5)]),
    seed=st.integers(0, 1000),
    skew=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_few_tokens_share_a_tile_of_each_expert_that_one_of_them_chose(
    sizes: tuple[int, int, int], seed: int, skew: float
) -> None:
    tokens, experts, chosen = sizes
    expert = drawn(seed, *sizes, skew)
    found: Groups = jax.tree.map(np.asarray, share(expert, experts))
    used = found.used[-1]
    assert sorted(found.expert_W[:used]) == np.unique(expert).tolist()
    assert len(found.expert_W) == min(experts, tokens * chosen)
    assert (found.rows_W[:used] == tokens).all() and not found.rows_W[used:].any()
    np.testing.assert_array_equal(found.expert_W[found.place_TK // found.tile], expert)
    assert (found.place_TK % found.tile == np.arange(tokens)[:, None]).all()
    assert found.tile >= tokens and found.shared == tokens
    assert {array.dtype for array in jax.tree.leaves(found)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_many_tokens_are_sorted_like_few(monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    expert = drawn(1, 70, 16, 3, skew)
    by_pairs = group_tokens(expert, 16, 8)
    monkeypatch.setattr(sorting, "MOST_PAIRS", 0)
    jax.tree.map(np.testing.assert_array_equal, group_tokens(expert, 16, 8), by_pairs)


@pytest.mark.parametrize(("tokens", "shared"), [(1, 1), (MOST_SHARED, MOST_SHARED), (17, None)])
def test_few_tokens_are_neither_sorted_nor_copied(tokens: int, shared: int | None) -> None:
    def rows(expert: jax.Array, x: jax.Array) -> jax.Array:
        groups = grouping(expert, 8)
        assert groups.shared == shared
        return groups.rows_of(x)

    expert = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    x = jax.ShapeDtypeStruct((tokens, 3), jnp.float32)
    assert (jax.eval_shape(rows, expert, x).shape == x.shape) == (shared is not None)


def test_tokens_of_an_expert_keep_their_order() -> None:
    found = group(drawn(0, 40, 4, 2, 0.0), 4, 8)
    for choice in range(4):
        rows = [
            row
            for tile in np.flatnonzero(np.asarray(found.expert_W) == choice)
            for row in range(tile * 8, tile * 8 + int(found.rows_W[tile]))
        ]
        assert (np.diff(np.asarray(found.token_P)[rows]) > 0).all()


@given(
    tokens=st.integers(1, 9000),
    experts=st.integers(1, 512),
    chosen=st.integers(1, 16),
    tile=st.sampled_from([8, 16, 64, 128]),
    seed=st.integers(0, 99),
)
def test_the_tiles_suffice_for_any_choice_and_no_tile_is_too_many(
    tokens: int, experts: int, chosen: int, tile: int, seed: int
) -> None:
    rows = tokens * min(chosen, experts)
    cuts = np.sort(np.random.default_rng(seed).integers(0, rows + 1, experts - 1))
    sizes = np.diff(np.concatenate([[0], cuts, [rows]]))
    bound = tiles_of(tokens, min(chosen, experts), experts, tile)
    assert np.sum(-(-sizes // tile)) <= bound
    partly = min(experts, rows)
    worst = np.full(partly, 1)
    worst[0] += (rows - partly) // tile * tile
    assert np.sum(-(-worst // tile)) == bound


@given(tokens=st.integers(1, 9000), experts=st.integers(1, 512), chosen=st.integers(1, 16))
def test_a_tile_is_a_power_of_two_that_is_not_much_more_than_an_expert_gets(
    tokens: int, experts: int, chosen: int
) -> None:
    tile = tile_for(tokens, min(chosen, experts), experts)
    assert tile & (tile - 1) == 0 and 8 <= tile <= LARGEST_TILE
    assert tile < 2 * max(tokens, 8)


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (16, 8), (64, 16), (256, 32), (8192, 128)])
def test_tiles_of_a_model_with_128_experts_and_8_choices(tokens: int, tile: int) -> None:
    assert tile_for(tokens, 8, 128) == tile


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_routed_feed_forward_equals_float64(case: Case) -> None:
    given = inputs(case)
    for tile in (tile_for(case.tokens, case.choices, case.experts), None):
        got = feed_forward(Inputs(*map(jnp.asarray, given)), tile)
        assert relative_error(got, expected(given)) < 1e-6, tile


def test_a_feed_forward_in_bfloat16_is_within_its_rounding() -> None:
    given = inputs(CASES[1])
    low = [jnp.asarray(a, jnp.bfloat16) for a in given[:3]]
    got = feed_forward(Inputs(*low, given.expert, given.weight), 8)
    assert got.dtype == jnp.bfloat16
    rounded = Inputs(*(np.asarray(a, np.float64) for a in low), given.expert, given.weight)
    assert relative_error(got, expected(rounded)) < 1e-2


def test_no_temporary_has_tokens_and_experts_and_a_width() -> None:
    """A dense product would hold `[T, E, F]`, or the weights of several experts at once."""
    given = Inputs(*map(jnp.asarray, inputs(CASES[-1])))
    compiled = feed_forward.lower(given, 16).compile()
    memory = compiled.memory_analysis()
    rows, width = tiles_of(300, 2, 8, 16) * 16, 192
    assert memory.temp_size_in_bytes < 4 * (4 * rows * width + 2 * given.gate_up[0].size) + 2**16


def test_gradients_reach_tokens_and_experts() -> None:
    given = Inputs(*map(jnp.asarray, inputs(CASES[1])))

    def loss(x: jax.Array, gate_up: jax.Array) -> jax.Array:
        return jnp.sum(feed_forward(given._replace(x=x, gate_up=gate_up), 8) ** 2)

    of_x, of_gate_up = jax.grad(loss, (0, 1))(given.x, given.gate_up)
    assert jnp.all(jnp.any(of_x != 0, axis=1))
    chosen = np.unique(given.expert)
    hit = np.flatnonzero(np.any(np.asarray(of_gate_up) != 0, axis=(1, 2)))
    np.testing.assert_array_equal(hit, chosen)


def test_a_back_end_that_does_not_take_the_arrays_leaves_them_to_the_reference() -> None:
    groups = group(drawn(0, 3, 4, 2, 0.0), 4, 8)
    x, w = jnp.zeros((groups.token_P.shape[0], 7)), jnp.zeros((4, 6, 7))
    assert next(iter(BACKENDS)) == "reference"
    assert choose(H200, x, w, groups, SILU) == "reference"
    assert choose(PORTABLE, x, w, groups, None) == "reference"


@pytest.mark.parametrize("sizes", [(1, 8, 3), (9, 8, 4), (40, 16, 3)])
def test_devices_that_share_the_experts_add_up_to_all_of_them(sizes: tuple[int, int, int]) -> None:
    tokens, experts, chosen = sizes
    expert = drawn(4, *sizes, 1.0)
    whole, half = jax.jit(grouping, static_argnums=1)(expert, experts), experts // 2
    value = np.arange(1.0, experts + 1)
    weight = np.random.default_rng(0).random((tokens, chosen), np.float32)
    total = np.zeros((tokens, 1))
    for first in (0, half):
        own = jax.jit(own_groups, static_argnums=2)(whole, first, half)
        used = int(own.used[-1])
        found = np.asarray(own.expert_W[:used])
        mine = expert[(expert >= first) & (expert < first + half)]
        assert sorted(set(found.tolist())) == np.unique(mine - first).tolist()
        assert np.asarray(own.rows_W[:used]).all() and not np.asarray(own.rows_W[used:]).any()
        if own.token_P is not None:
            held = np.asarray(own.token_P)[np.asarray(own.place_TK)]
            np.testing.assert_array_equal(
                held, np.broadcast_to(np.arange(tokens)[:, None], held.shape)
            )
        # Rows of tiles that are not in use hold anything
        y_P = np.where(np.arange(own.rows) < used * own.tile, 0.0, np.nan)
        y_P[: used * own.tile] = value[first + found].repeat(own.tile)
        total += combine(jnp.asarray(y_P[:, None], jnp.float32), own, weight)
    wanted = (value[expert] * weight).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
