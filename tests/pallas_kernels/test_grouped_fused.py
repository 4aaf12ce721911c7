"""The routed feed-forward in one launch: the same bits as two products, and how its units lie."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import (
    Experts,
    combine,
    find_one_launch,
    group,
    group_tokens,
    grouped_matmul,
    mosaic_gpu,
)
from pallas_kernels.grouped_matmul.cases import (
    CASES,
    MODEL_SHAPES,
    Case,
    Inputs,
    expected,
    inputs,
)
from pallas_kernels.grouped_matmul.groups import Groups, share_tokens
from pallas_kernels.grouped_matmul.mosaic_fused import feed_forward, places_of
from pallas_kernels.grouped_matmul.mosaic_gpu import Spec
from pallas_kernels.grouped_matmul.plan import ONE_LAUNCH, PROCESSORS, K, Tuning, tuning_of
from pallas_kernels.target import Target
from tests.pallas_kernels.places import card, launch_options, relative_error

FEW = Case(name="few tokens", tokens=3, experts=6, choices=2, width=64)
SORTED = Case(name="tiles of several experts", tokens=20, experts=4, choices=2, skew=3.0)

MOST_USED, MOST_BLOCKS = 20, 140


@functools.cache
def fused() -> Any:
    return jax.jit(feed_forward, static_argnames=("gating", "tuning", "interpret"))


@functools.cache
def product() -> Any:
    static = ("gating", "tuning", "interpret")
    return jax.jit(mosaic_gpu.grouped_matmul, static_argnames=static)


def arrays(case: Case, dtype: str) -> tuple[Inputs, Experts]:
    """Inputs in a type, and weights with biases; experts that nobody chose are NaN."""
    given = inputs(case)
    idle = np.setdiff1d(np.arange(case.experts), given.expert)
    low = [jnp.asarray(a, dtype) for a in given[:3]]
    gate_up, down = (w.at[idle].set(jnp.nan) for w in low[1:])
    biases = (jnp.arange(w.shape[0] * w.shape[1]).reshape(w.shape[:2]) % 7 / 4 for w in low[1:])
    return Inputs(*low, given.expert, given.weight), Experts(
        gate_up, down, *(bias.astype(dtype) for bias in biases)
    )


def one_launch(
    place: str, case: Case, groups: Groups, dtype: str, tuning: Tuning | None
) -> np.ndarray:
    """Each token's result."""
    given, weights = arrays(case, dtype)
    options = launch_options(place) | {"tuning": tuning}
    y = fused()(given.x, weights, groups, gating=SILU, **options)
    return np.asarray(combine(y, groups, given.weight))


def two_products(run: Any, case: Case, groups: Groups, dtype: str, **options: Any) -> np.ndarray:
    """The same by two calls of an op."""
    given, weights = arrays(case, dtype)
    run = functools.partial(run, groups=groups, **options)
    hidden = run(given.x, weights.gate_up_EOI, bias_EO=weights.gate_up_bias_EO, gating=SILU)
    y = run(hidden, weights.down_EDF, bias_EO=weights.down_bias_ED, gating=None)
    return np.asarray(combine(y, groups, given.weight))


def test_one_launch_equals_the_reference_and_reads_nothing_else() -> None:
    groups = share_tokens(jnp.asarray(inputs(FEW).expert), FEW.experts)
    one = one_launch("interpreter", FEW, groups, "bfloat16", Tuning(1, 3))
    wanted = two_products(grouped_matmul, FEW, groups, "bfloat16", backend="reference")
    assert relative_error(one, wanted) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("tile", [8, 16])
def test_one_launch_gives_the_bits_of_two(tile: int) -> None:
    groups = group_tokens(jnp.asarray(inputs(SORTED).expert), SORTED.experts, tile)
    one = one_launch("interpreter", SORTED, groups, "bfloat16", Tuning(1, 3))
    options = launch_options("interpreter") | {"tuning": Tuning(1, 3)}
    np.testing.assert_array_equal(
        one, two_products(product(), SORTED, groups, "bfloat16", **options)
    )


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CASES, FEW, SORTED], ids=lambda case: case.name)
def test_one_launch_gives_the_bits_of_two_on_a_card(place: str, case: Case, dtype: str) -> None:
    groups = group(jnp.asarray(inputs(case).expert), case.experts)
    two = two_products(product(), case, groups, dtype)
    for _ in range(20):  # blocks meet in another order each time
        np.testing.assert_array_equal(one_launch(place, case, groups, dtype, None), two)


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("tokens", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_a_models_layer_gives_the_same_bits_each_time_on_a_card(
    place: str, model: str, tokens: int
) -> None:
    shape = MODEL_SHAPES[model]
    sizes = {"width": shape.width, "inner": shape.inner, "experts": shape.experts}
    case = Case(name="", tokens=tokens, choices=shape.choices, **sizes)
    given = inputs(case)
    groups = group(jnp.asarray(given.expert), shape.experts)
    low = [jnp.asarray(a, jnp.bfloat16) for a in given[:3]]
    run = functools.partial(fused(), gating=SILU, **launch_options(place))
    x = low[0]
    first = np.asarray(combine(run(x, Experts(*low[1:]), groups), groups, given.weight))
    few = min(tokens, 16)  # the oracle is slow
    exact = Inputs(
        *(np.asarray(a, np.float64) for a in low), given.expert[:few], given.weight[:few]
    )
    assert relative_error(first[:few], expected(exact._replace(x=exact.x[:few]))) < 5e-3
    for _ in range(50):
        again = combine(run(x, Experts(*low[1:]), groups), groups, given.weight)
        np.testing.assert_array_equal(again, first)


def spec_of(outputs: int, width: int, gating: Any) -> Spec:
    return Spec(8, 8, None, False, outputs, width, gating, jnp.bfloat16, tuning_of(8), None)


@functools.cache
def places(sizes: tuple[int, int]) -> Any:
    """For each product the number of units of every block, and the number of each unit."""
    inner, width = sizes
    specs = spec_of(2 * inner, width, SILU), spec_of(width, inner, None)
    turn_N1 = jnp.arange(MOST_USED * max(spec.across for spec in specs))[:, None]

    @jax.jit
    def run(used: int, blocks: int) -> list[tuple[jax.Array, jax.Array]]:
        block_B = jnp.arange(MOST_BLOCKS, dtype=jnp.int32)
        both = places_of(specs, used, block_B, blocks)
        return [(count, place(turn_N1)) for count, place in both]

    return specs, run


@given(
    used=st.integers(0, MOST_USED),
    blocks=st.integers(1, MOST_BLOCKS),
    sizes=st.sampled_from([(64, 64), (192, 1024), (768, 2048), (1408, 512)]),
)
def test_each_unit_has_one_block_and_blocks_have_like_shares(
    used: int, blocks: int, sizes: tuple[int, int]
) -> None:
    specs, run = places(sizes)
    steps_B = np.zeros(blocks, int)
    for spec, (count_B, place_NB) in zip(specs, run(used, blocks), strict=True):
        count_B, place_NB = np.asarray(count_B)[:blocks], np.asarray(place_NB)[:, :blocks]
        own = place_NB[np.arange(len(place_NB))[:, None] < count_B]
        assert sorted(own) == list(range(used * spec.across))
        steps_B += count_B * (spec.I // K)
    assert steps_B.max() - steps_B.min() <= 2 * max(sizes) // K


@pytest.mark.parametrize("tokens", [16])
def test_a_models_layer_lowers_for_cuda_in_one_launch(tokens: int) -> None:
    shape = MODEL_SHAPES["Qwen3-30B-A3B"]
    low = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    experts, inner, width = shape.experts, shape.inner, shape.width
    weights = Experts(low((experts, 2 * inner, width)), low((experts, width, inner)))

    def layer(x: jax.Array, weights: Experts, expert: jax.Array) -> jax.Array:
        groups = group(expert, experts)
        return feed_forward(x, weights, groups, SILU)

    expert = jax.ShapeDtypeStruct((tokens, shape.choices), jnp.int32)
    traced = jax.jit(layer).trace(low((tokens, width)), weights, expert)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("tokens", "processors", "capability", "taken"),
    [
        (64, PROCESSORS, "9.0", True),
        (64, PROCESSORS + 16, "9.0", True),
        (64, PROCESSORS - 1, "9.0", False),  # some blocks would never start
        (64, 0, "9.0", False),
        (64, PROCESSORS, "10.0", False),
        (ONE_LAUNCH.stop, PROCESSORS, "9.0", False),
    ],
)
def test_one_launch_is_for_tokens_and_cards_that_gain(
    tokens: int, processors: int, capability: str, taken: bool
) -> None:
    low = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    experts = Experts(low((4, 256, 64)), low((4, 64, 128)))
    choice = jax.ShapeDtypeStruct((tokens, 2), jnp.int32)
    groups = jax.eval_shape(functools.partial(group, experts=4), choice)
    given = low((tokens, 64)), experts, groups, SILU
    target = Target.gpu(capability, processors)
    assert (find_one_launch(target, *given) is not None) == taken
    wrong = experts._replace(down_EDF=low((4, 64, 96)))
    assert find_one_launch(target, given[0], wrong, *given[2:]) is None


def test_weights_that_do_not_fit_are_refused() -> None:
    case = Case(name="", tokens=2, experts=2, choices=1)
    given, weights = arrays(case, "bfloat16")
    groups = group(jnp.asarray(given.expert), 2)
    wrong = weights._replace(down_EDF=weights.down_EDF.astype(jnp.float32))
    with pytest.raises(ValueError, match="takes bfloat16 or float16 throughout"):
        feed_forward(given.x, wrong, groups, SILU)
