"""The Hopper kernel of grouped products in the interpreter and on a card, and its sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import (
    Groups,
    combine,
    group_tokens,
    grouped_matmul,
    mosaic_gpu,
    tile_for,
)
from pallas_kernels.grouped_matmul import group as grouping
from pallas_kernels.grouped_matmul.cases import (
    CASES,
    MODEL_SHAPES,
    Case,
    Inputs,
    choices,
    expected,
    inputs,
)
from pallas_kernels.grouped_matmul.groups import MOST_SHARED, share_tokens
from pallas_kernels.grouped_matmul.mosaic_rows import spread
from pallas_kernels.grouped_matmul.plan import (
    MOST_STAGES,
    ROWS,
    SHARED_BYTES,
    K,
    Tuning,
    tuning_of,
    widths_of,
)
from tests.pallas_kernels.places import (
    card,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)

TILES = (8, 16, 32, 64, 128)
# Half of a second block's rows lie beyond an inner width of 192
CUT = Case(name="two warpgroups, cut", tokens=20, experts=4, choices=2, inner=192, skew=3.0)
FEW = Case(name="few tokens", tokens=3, experts=6, choices=2, width=64)
SHARED = Case(name="tokens in two rows of tiles", tokens=11, experts=4, choices=2)
SMALL = Case(name="several widths", tokens=20, experts=4, choices=2, inner=128, skew=3.0)
ERROR = {"bfloat16": 5e-3, "float16": 1e-3}


grouped = jax.jit(group_tokens, static_argnums=(1, 2))
shared = jax.jit(share_tokens, static_argnums=1)


def product(
    place: str, x: Any, w: Any, groups: Groups, bias: Any, gating: Any, tuning: Tuning | None
) -> jax.Array:
    """The kernel's product, with an output that starts as NaN."""
    columns = w.shape[1] // (2 if gating else 1)
    rows = groups.expert_W.shape[0] * groups.tile
    poison_outputs(place, jax.ShapeDtypeStruct((rows, columns), x.dtype))
    options = launch_options(place) | {"tuning": tuning}
    return kernel()(x, w, groups, bias, gating=gating, **options)


@functools.cache
def kernel() -> Any:
    static = ("gating", "tuning", "interpret")
    return jax.jit(mosaic_gpu.grouped_matmul, static_argnames=static)


def feed_forward(place: str, given: Inputs, tile: int | None, tuning: Tuning | None) -> np.ndarray:
    """The routed feed-forward; rows that no token takes are NaN, and so are idle experts. Without a
    height of tiles, tokens share them."""
    experts, expert = given.gate_up.shape[0], jnp.asarray(given.expert)
    groups = shared(expert, experts) if tile is None else grouped(expert, experts, tile)
    idle = np.setdiff1d(np.arange(experts), given.expert)
    gate_up, down = given.gate_up.at[idle].set(jnp.nan), given.down.at[idle].set(jnp.nan)
    x = groups.rows_of(given.x)
    if tile is not None:
        taken = jnp.zeros(len(x), bool).at[groups.place_TK].set(True)
        x = jnp.where(taken[:, None], x, jnp.nan)
    bias = jnp.asarray(bias_of(given), x.dtype).at[idle].set(jnp.nan)
    hidden = product(place, x, gate_up, groups, bias, SILU, tuning)
    out = product(place, hidden, down, groups, None, None, tuning)
    return np.asarray(combine(out, groups, given.weight))


def bias_of(given: Inputs) -> np.ndarray:
    """A bias of gate and up, exact in 16 bits."""
    experts, outputs = given.gate_up.shape[:2]
    return (np.arange(experts * outputs).reshape(experts, outputs) % 7 - 3) / 4


def rounded(case: Case, dtype: str, seed: int = 0) -> tuple[Inputs, np.ndarray]:
    """Inputs in a type, and what they should give."""
    given = inputs(case, seed)
    low = [jnp.asarray(a, dtype) for a in given[:3]]
    exact = Inputs(*(np.asarray(a, np.float64) for a in low), given.expert, given.weight)
    return Inputs(*low, given.expert, given.weight), expected(exact, bias_of(given))


@pytest.mark.parametrize(
    ("case", "tile", "tuning"),
    [
        (SMALL, 32, Tuning(1, 3)),
        (FEW, None, Tuning(1, 3)),
        pytest.param(SHARED, None, Tuning(1, 4), marks=pytest.mark.slow),
        pytest.param(SMALL, 16, Tuning(1, 2, 128), marks=pytest.mark.slow),
        pytest.param(CUT, 8, Tuning(2, 2), marks=pytest.mark.slow),
        *(pytest.param(case, 16, Tuning(1, 4), marks=pytest.mark.slow) for case in CASES),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_a_feed_forward_equals_float64_and_reads_nothing_else(
    case: Case, tile: int | None, tuning: Tuning
) -> None:
    given, wanted = rounded(case, "bfloat16")
    got = feed_forward("interpreter", given, tile, tuning)
    assert relative_error(got, wanted) < ERROR["bfloat16"]


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("case", [*CASES, CUT, FEW, SHARED, SMALL], ids=lambda case: case.name)
def test_every_case_equals_float64_on_a_card(place: str, case: Case, dtype: str) -> None:
    given, wanted = rounded(case, dtype)
    for tile in (*TILES, None) if case.tokens <= MOST_SHARED else TILES:
        got = feed_forward(place, given, tile, None)
        assert relative_error(got, wanted) < ERROR[dtype], tile


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("tokens", [1, 7, 16, 64, 256, 1000])
@pytest.mark.parametrize("skew", [0.0, 1.2])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_a_models_shape_equals_float64_on_a_card(
    place: str, model: str, skew: float, tokens: int
) -> None:
    shape = MODEL_SHAPES[model]
    sizes = {"width": shape.width, "inner": shape.inner}
    case = Case(
        name="", tokens=tokens, experts=shape.experts, choices=shape.choices, skew=skew, **sizes
    )
    few = min(tokens, 64)  # the oracle is slow
    given, wanted = rounded(case, "bfloat16")
    tile = tile_for(tokens, case.choices, case.experts) if tokens > MOST_SHARED else None
    got = feed_forward(place, given, tile, None)
    assert relative_error(got[:few], wanted[:few]) < 5e-3
    assert np.isfinite(got.astype(np.float32)).all()


@places
def test_a_row_depends_on_itself_alone_and_repeats(place: str) -> None:
    given, _ = rounded(SMALL, "bfloat16")
    tuning = pick(place, Tuning(1, 3), None)
    first = feed_forward(place, given, 32, tuning)
    np.testing.assert_array_equal(feed_forward(place, given, 32, tuning), first)
    dirty = given._replace(x=given.x.at[7:].set(jnp.nan))
    other = feed_forward(place, dirty, 32, tuning)
    np.testing.assert_array_equal(other[:7], first[:7])
    assert np.isnan(other[7:].astype(np.float32)).all()


@places
@pytest.mark.parametrize("width", [64, 192, pytest.param(384, marks=pytest.mark.slow)])
def test_tokens_are_copied_to_the_rows_that_they_take(place: str, width: int) -> None:
    tokens, rng = pick(place, 5, 300), np.random.default_rng(0)
    groups = grouped(choices(tokens, 6, 2, 0.0, rng), 6, 8)
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)
    run = jax.jit(spread, static_argnames="interpret")
    got = run(x, groups, **{"interpret": None} | launch_options(place))
    assert got.shape == (groups.rows, width)
    np.testing.assert_array_equal(got[groups.place_TK], jnp.stack([x, x], axis=1))


def test_a_product_of_tokens_is_that_of_their_rows() -> None:
    groups = grouped(jnp.asarray([[0, 1], [2, 1], [0, 2]], jnp.int32), 3, 8)
    x, w = jnp.arange(12.0).reshape(3, 4), jnp.arange(24.0).reshape(3, 2, 4)
    rows = grouped_matmul(groups.rows_of(x), w, groups, backend="reference")
    np.testing.assert_array_equal(grouped_matmul(x, w, groups, backend="reference"), rows)


@pytest.mark.parametrize("tile", TILES)
def test_sizes_fit_a_processor(tile: int) -> None:
    sizes = tuning_of(tile)
    slot = (2 * sizes.warpgroups * ROWS + tile) * K * 2
    assert sizes.stages * slot + sizes.warpgroups * tile * ROWS * 2 <= SHARED_BYTES
    assert 4 <= sizes.stages <= MOST_STAGES
    under_way = sizes.stages * 2 * sizes.warpgroups * ROWS * K * 2
    assert under_way >= 128 << 10, "fewer bytes under way do not hide the memory's latency"
    widths = widths_of(tile)
    assert widths[-1] == tile and len(widths) <= 3 and list(widths) == sorted(widths)


def shapes(tokens: int, model: str) -> tuple[Any, Any, Groups]:
    """Arguments of a model's gate and up, without arrays."""
    made = MODEL_SHAPES[model]
    expert = jax.ShapeDtypeStruct((tokens, made.choices), jnp.int32)
    groups = jax.eval_shape(lambda expert: grouping(expert, made.experts), expert)
    x = jax.ShapeDtypeStruct((tokens, made.width), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((made.experts, 2 * made.inner, made.width), jnp.bfloat16)
    return x, w, groups


@pytest.mark.parametrize(
    ("tokens", "model"),
    [(1, "Qwen3-30B-A3B"), (16, "Qwen3-30B-A3B"), (4096, "DeepSeek-V2-Lite")],
)
def test_a_models_gate_and_up_lower_for_cuda(tokens: int, model: str) -> None:
    x, w, groups = shapes(tokens, model)
    run = jitted(functools.partial(mosaic_gpu.grouped_matmul, bias_EO=None, gating=SILU))
    assert "mosaic_gpu_v2" in run.trace(x, w, groups).lower(lowering_platforms=("cuda",)).as_text()


LOW = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("x", "w", "gating", "message"),
    [
        (LOW((8, 64)), LOW((2, 64)), None, r"x \[P, I\] and w \[E, O, I\], got \(8, 64\)"),
        (LOW((8, 64)), LOW((2, 64, 128)), None, r"w \[E, O, I\], got \(8, 64\)"),
        (LOW((8, 64)), jax.ShapeDtypeStruct((2, 64, 64), "float32"), None, "w float32"),
        (LOW((8, 64)), LOW((2, 64, 64)), SILU, r"O a multiple of 128.*w \(2, 64, 64\)"),
        (LOW((8, 96)), LOW((2, 64, 96)), None, r"I of 64, got w \(2, 64, 96\)"),
        (LOW((8, 64)), LOW((2, 128, 64)), lambda g, u: jax.lax.erf(g) * u, "without erf"),
    ],
)
def test_a_refusal_names_what_was_given(x: Any, w: Any, gating: Any, message: str) -> None:
    groups = group_tokens(jnp.zeros((1, 1), jnp.int32), 2, 8)
    with pytest.raises(ValueError, match=f"mosaic_gpu grouped_matmul takes .*{message}"):
        mosaic_gpu.check(x, w, groups, gating)


def test_tiles_of_other_heights_are_refused() -> None:
    groups = group_tokens(jnp.zeros((1, 1), jnp.int32), 2, 24)
    with pytest.raises(ValueError, match="a power of two, got 24"):
        mosaic_gpu.check(LOW((24, 64)), LOW((2, 64, 64)), groups, None)
