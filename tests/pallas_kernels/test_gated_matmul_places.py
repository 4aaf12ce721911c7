"""The gated product's kernel in the interpreter and on a card, and the sizes of its plan."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_matmul import (
    GELU,
    SILU,
    Gated,
    find,
    gated_matmul,
    mosaic_gpu,
    plan,
)
from pallas_kernels.gated_matmul.cases import CASES, MODEL_SHAPES, Case, expected, inputs
from pallas_kernels.gated_matmul.plan import Tuning
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)
from tests.targets import H200

reference = jax.jit(functools.partial(gated_matmul, backend="reference"), static_argnames="gating")
gatings = pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])
ERROR = {"bfloat16": 5e-3, "float16": 1e-3}
SMALLEST = Case(name="the smallest", tokens=3, outputs=16, inputs=64)
any_rows = st.integers(1, 5000)
any_outputs = st.integers(1, 2500).map(lambda x: 16 * x)
any_inputs = st.integers(1, 250).map(lambda x: 64 * x)


def launched(
    place: str, x: Any, w: Any, tuning: Tuning | None = None, gating: Gated = SILU
) -> np.ndarray:
    """The kernel's product, with an output that starts as NaN."""
    poison_outputs(place, jax.ShapeDtypeStruct((x.shape[0], w.shape[0] // 2), x.dtype))
    run = jitted(mosaic_gpu.gated_matmul)
    return np.asarray(run(x, w, gating=gating, tuning=tuning, **launch_options(place)))


@places
@gatings
@pytest.mark.parametrize("dtype", ERROR)
def test_the_product_equals_float64(place: str, dtype: str, gating: Gated) -> None:
    for case, seed in itertools.product(pick(place, [SMALLEST], CASES), pick(place, [3], [1, 2])):
        x, w = (jnp.asarray(a, dtype) for a in inputs(case, seed))
        got = launched(place, x, w, pick(place, Tuning(64, 16, 2, 1), None), gating)
        wanted = expected(np.asarray(x), np.asarray(w), gating)
        assert got.shape == wanted.shape and got.dtype == x.dtype
        assert relative_error(got, wanted) < ERROR[dtype], (case.name, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 192, 200, 256, 257, 512, 1500, 2048])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_a_models_shape_equals_the_reference_on_a_card(model: str, rows: int) -> None:
    O, I = MODEL_SHAPES[model]
    gating = GELU if "Gemma" in model else SILU
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, I), jnp.bfloat16)
    w = jax.random.normal(keys[1], (O, I), jnp.bfloat16) / I**0.5
    found = launched(CARD, x, w, gating=gating)
    assert relative_error(found, reference(x, w, gating=gating)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("O", "I"), [(2 * 5464, 4096), (2 * 13656, 1024), (2 * 104, 64), (9728, 896)]
)
@pytest.mark.parametrize("rows", [7, 100, 700])
def test_widths_that_no_wide_copy_divides_equal_the_reference_on_a_card(
    O: int,
    I: int,
    rows: int,
) -> None:
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, I), jnp.bfloat16)
    w = jax.random.normal(keys[1], (O, I), jnp.bfloat16) / I**0.5
    assert relative_error(launched(CARD, x, w), reference(x, w, gating=SILU)) < 5e-3


@places
def test_a_row_depends_on_itself_alone_and_repeats(place: str) -> None:
    tokens, outputs, width = pick(place, (9, 16, 64), (256, 37888, 3584))
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((outputs, width)) / width**0.5, jnp.bfloat16)
    tuning = pick(place, Tuning(64, 16, 2, 1), None)
    first = launched(place, x, w, tuning)
    for _ in range(pick(place, 1, 5)):
        np.testing.assert_array_equal(launched(place, x, w, tuning), first)
    dirty = x.at[2:].set(jnp.nan)
    other = launched(place, dirty, w, tuning)
    np.testing.assert_array_equal(other[:2], first[:2])
    assert np.isnan(other[2:].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", sorted(plan.WARPGROUPS))
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_class_of_rows_and_cluster_is_right_on_a_card(rows: int, cluster: int) -> None:
    case = Case(name="", tokens=rows + 37, outputs=1440, inputs=640)
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in inputs(case))
    for n in (16, 96, plan.MAX_N[rows]):
        stages = min(8, plan.stages_of(rows, n, case.outputs // 2))
        got = launched(CARD, x, w, Tuning(rows, n, stages, cluster))
        assert relative_error(got, expected(np.asarray(x), np.asarray(w), SILU)) < 5e-3, n


@given(M=any_rows, O=any_outputs, I=any_inputs)
@settings(max_examples=60)
def test_any_sizes_have_a_plan_that_fits_the_card(M: int, O: int, I: int) -> None:
    tuning = plan.tuning_of(M, O, I)
    F, groups = O // 2, tuning.warpgroups
    assert tuning.rows in plan.WARPGROUPS and tuning.cluster in (1, 2)
    assert tuning.n % 16 == 0 and 16 <= tuning.n <= min(plan.MAX_N[tuning.rows], O)
    chunk = plan.chunk_of(tuning.rows // groups, tuning.n // 2, groups, F)
    ring = tuning.stages * (tuning.rows + tuning.n) * plan.K * 2
    assert ring + tuning.rows * chunk * 2 <= plan.SHARED_BYTES
    assert 4 <= tuning.stages <= 8
    assert plan.bands(M, tuning.rows) * tuning.rows >= M
    if M <= 256:
        assert plan.bands(M, tuning.rows) == 1, "one band holds a batch of decodes"


@given(
    height=st.sampled_from([64, 128]),
    width=st.integers(1, 16).map(lambda x: 8 * x),
    groups=st.integers(1, 3),
    F=st.integers(1, 2000).map(lambda x: 8 * x),
)
def test_a_staged_piece_divides_the_tile_and_is_copied_in_whole_boxes(
    height: int, width: int, groups: int, F: int
) -> None:
    chunk = plan.chunk_of(height, width, groups, F)
    box = min(64, chunk & -chunk)
    assert width % chunk == 0 and chunk % box == 0 and F % box == 0
    assert chunk == 8 or groups * height * chunk * 2 <= plan.STAGING_BYTES


def test_the_model_prefers_full_rounds_of_the_processors() -> None:
    """At 256 rows and O = 37,888, tiles of 144 are two full rounds of 132 blocks."""
    tuning = plan.tuning_of(256, 37888, 3584)
    blocks = -(-37888 // (tuning.n * tuning.cluster)) * tuning.cluster
    assert blocks % plan.PROCESSORS == 0 or blocks % plan.PROCESSORS > plan.PROCESSORS * 0.9


@given(M=any_rows, O=any_outputs, I=any_inputs)
@settings(max_examples=40)
def test_modelled_time_is_no_less_than_reading_the_weight(M: int, O: int, I: int) -> None:
    seconds = plan._seconds(M, O, I, plan.tuning_of(M, O, I))
    assert seconds >= 2 * O * I / plan.MEMORY_RATE


def test_every_measured_size_is_one_that_the_kernel_takes(repo: pathlib.Path) -> None:
    for path in (repo / "pallas_kernels/gated_matmul/tuned").glob("*.json"):
        for name, sizes in json.loads(path.read_text())["sizes"].items():
            O, I, M = (int(x) for x in name.split("x"))
            tuning = Tuning(**sizes)
            assert tuning.stages <= plan.stages_of(tuning.rows, tuning.n, O // 2), name
            assert O % 16 == 0 and I % plan.K == 0 and M > 0, name


@given(rows=st.integers(1, 4096), weight=st.integers(1, 1 << 31))
def test_the_kernel_is_chosen_only_where_a_weight_is_large_or_rows_are_many(
    rows: int, weight: int
) -> None:
    if plan.is_faster(rows, weight):
        assert rows >= 64 and weight >= 8 << 20
        assert rows >= 1024 or weight >= 64 << 20
        assert not (257 <= rows <= 320 or 513 <= rows <= 544), "whose tiles would be half empty"
        assert plan.is_faster(rows, 2 * weight), "a larger weight gains more"


def test_the_choice_asks_the_kernel_whether_it_supports_the_arrays() -> None:
    shape = jax.ShapeDtypeStruct
    x, odd = shape((64, 3600), jnp.bfloat16), shape((37888, 3600), jnp.bfloat16)
    assert plan.is_faster(64, odd.size * 2)
    assert find(H200, x, odd, SILU) is None  # type: ignore[arg-type]
    fit = shape((37888, 3584), jnp.bfloat16)
    x = shape((64, 3584), jnp.bfloat16)
    assert find(H200, x, fit, SILU) == "mosaic_gpu"  # type: ignore[arg-type]
    assert find(H200, x, fit, GELU) == "mosaic_gpu"  # type: ignore[arg-type]
    exact = Gated(functools.partial(jax.nn.gelu, approximate=False))
    assert find(H200, x, fit, exact) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (((4, 64), "float32"), ((16, 64), "float32"), "throughout, got x float32, w float32"),
        (((4, 64), "bfloat16"), ((16, 64), "float16"), "got x bfloat16, w float16"),
        (((4, 64), "bfloat16"), ((24, 64), "bfloat16"), r"O a multiple of 16.*w \(24, 64\)"),
        (((4, 96), "bfloat16"), ((16, 96), "bfloat16"), r"I of 64, got w \(16, 96\)"),
        (
            ((4, 64), "bfloat16"),
            ((16, 128), "bfloat16"),
            r"x \[M, I\] and w \[O, I\], got \(4, 64\)",
        ),
        (((4, 2, 64), "bfloat16"), ((16, 64), "bfloat16"), r"got \(4, 2, 64\)"),
        (((0, 64), "bfloat16"), ((16, 64), "bfloat16"), r"got \(0, 64\)"),
        (((4, 0), "bfloat16"), ((16, 0), "bfloat16"), r"got w \(16, 0\)"),
    ],
)
def test_a_refusal_names_what_was_given(
    x: tuple[tuple[int, ...], str], w: tuple[tuple[int, ...], str], message: str
) -> None:
    with pytest.raises(ValueError, match=f"mosaic_gpu gated_matmul takes .*{message}"):
        mosaic_gpu.check(jax.ShapeDtypeStruct(*x), jax.ShapeDtypeStruct(*w), SILU)


def test_the_reference_is_silu_of_the_gate_times_up_in_float32() -> None:
    x = jnp.array([[1.0, 2.0]], jnp.bfloat16)
    w = jnp.array([[1.0, 0.0], [0.0, -1.0], [0.5, 0.5], [1.0, 1.0]], jnp.bfloat16)
    got = np.asarray(gated_matmul(x, w, gating=SILU, backend="reference"), np.float64)
    silu = lambda g: g / (1 + np.exp(-g))
    np.testing.assert_allclose(got, [[silu(1.0) * 1.5, silu(-2.0) * 3.0]], rtol=2**-8)
    assert got.shape == (1, 2)
