"""The scaled product's kernel for Hopper in the interpreter and on a card, and its sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.mosaic_units import PROCESSORS, ROWS, STAGED
from pallas_kernels.scaled_matmul import (
    BACKENDS,
    choose,
    mosaic_gpu,
    mosaic_rounding,
    plan,
    rounded,
    scaled_matmul,
)
from pallas_kernels.scaled_matmul.cases import (
    KERNEL_CASES,
    Case,
    Inputs,
    expected,
    inputs,
)
from pallas_kernels.scaled_matmul.plan import Tuning
from pallas_kernels.target import PORTABLE, Target
from tests.pallas_kernels.places import (
    CARD,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)
from tests.targets import H200, TPU

ERROR = 2.5e-3  # one rounding to bfloat16
SMALL = {
    "rows, two shares": (Case(name="", tokens=3, outputs=128, columns=384), Tuning(8, 1, 2, 2)),
    "rows cut off": (
        Case(name="", tokens=20, outputs=72, columns=256, inputs="given"),
        Tuning(16, 2, 2, 1),
    ),
    "blocks": (
        Case(name="", tokens=9, outputs=136, columns=384, group=128, inputs="group"),
        Tuning(16, 1, 2, 1),
    ),
    "integers": (
        Case(name="", tokens=9, outputs=64, columns=256, integers=True),
        Tuning(16, 1, 2, 1),
    ),
}


def arrays(case: Case) -> Inputs:
    """The inputs of a case, x as bfloat16 has it."""
    given = inputs(case)
    return given._replace(x=given.x.astype(ml_dtypes.bfloat16).astype(np.float32))


@functools.cache
def compiled(group: int, rounding: str, tuning: Tuning | None, place: str) -> Any:
    options = launch_options(place)
    return jax.jit(
        lambda x, w, s, own: mosaic_gpu.scaled_matmul(
            x, w, s, group, rounding, own, tuning=tuning, **options
        )
    )


def launched(place: str, case: Case, given: Inputs, tuning: Tuning | None = None) -> np.ndarray:
    """The kernel's product, with an output that starts as NaN."""
    poison_outputs(place, jax.ShapeDtypeStruct((case.tokens, case.outputs), jnp.bfloat16))
    run = compiled(case.group or case.columns, case.inputs, tuning, place)
    x = jnp.asarray(given.x, jnp.bfloat16)
    return np.asarray(run(x, given.weight, given.scale, given.input_scale))


@places
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("rows, two shares", "blocks") else pytest.mark.slow)
        for name in SMALL
    ],
)
def test_the_product_is_that_of_the_definition(place: str, name: str) -> None:
    case, sizes = SMALL[name]
    got = launched(place, case, arrays(case), pick(place, sizes, None))
    assert got.shape == (case.tokens, case.outputs) and got.dtype == jnp.bfloat16
    assert relative_error(got, expected(case, arrays(case))) < ERROR


def own_sizes(case: Case) -> Tuning:
    """Sizes with which the kernel multiplies, also where XLA would be as fast."""
    return plan.tuning_of(case.tokens, case.outputs, case.columns, case.group is not None)


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_every_case_is_right_in_the_interpreter(case: Case) -> None:
    got = launched("interpreter", case, arrays(case), own_sizes(case))
    assert relative_error(got, expected(case, arrays(case))) < ERROR


@places
def test_many_rows_are_a_product_of_xlas_with_sums_of_16_bits(place: str) -> None:
    case = Case(name="", tokens=100, outputs=64, columns=256)
    assert not plan.is_faster(case.tokens, grouped=False)
    got = launched(place, case, arrays(case))
    assert relative_error(got, expected(case, arrays(case))) < 1.5 * ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_every_case_is_right_on_a_card(case: Case) -> None:
    got = launched(CARD, case, arrays(case), own_sizes(case))
    assert relative_error(got, expected(case, arrays(case))) < 2 * ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 100, 256, 300])
@pytest.mark.parametrize("kind", ["rows", "blocks", "integers"])
@pytest.mark.parametrize("product", LAYER_SHAPES)
def test_a_models_shape_equals_the_reference_on_a_card(product: str, kind: str, rows: int) -> None:
    O, I = LAYER_SHAPES[product]
    group, rounding = (128, "group") if kind == "blocks" else (None, "token")
    case = Case(
        name="",
        tokens=rows,
        outputs=O,
        columns=I,
        group=group,
        inputs=rounding,
        integers=kind == "integers",
    )
    given = arrays(case)
    wanted = scaled_matmul(
        jnp.asarray(given.x),  # float32: exact
        given.weight,
        given.scale,
        group=group or I,
        inputs=rounding,
        backend="reference",
    )
    assert relative_error(launched(CARD, case, given, own_sizes(case)), wanted) < 2 * ERROR


@pytest.mark.gpu
def test_a_row_gives_the_same_bits_in_any_batch_of_one_size_on_a_card() -> None:
    case = Case(name="", tokens=64, outputs=4608, columns=3584)
    given = arrays(case)
    turned = given._replace(x=np.roll(given.x, 7, axis=0))
    both = (
        launched(CARD, case, each, own_sizes(case)).astype(np.float32) for each in (given, turned)
    )
    first, second = both
    np.testing.assert_array_equal(np.roll(first, 7, axis=0), second)


def test_tokens_beyond_the_last_do_not_reach_others() -> None:
    case, sizes = SMALL["rows, two shares"]
    given = arrays(case)
    dirty = given.x.copy()
    dirty[1] = np.nan
    found = launched("interpreter", case, given._replace(x=dirty), sizes).astype(np.float32)
    clean = launched("interpreter", case, given, sizes).astype(np.float32)
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(
    ("rows", "group", "dtype"),
    [
        (1, 3584, "float8_e4m3fn"),
        (2048, 128, "float8_e4m3fn"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (64, 128, "float8_e4m3fn"),
                (100, 3584, "float8_e4m3fn"),
                (256, 3584, "float8_e4m3fn"),
                (64, 3584, "int8"),
                (300, 3584, "int8"),
            )
        ),
    ],
)
def test_the_kernel_lowers_for_cuda(rows: int, group: int, dtype: str) -> None:
    O = 4608 if rows > 1 else 4616  # and widths that no tile divides
    x, w, s = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((rows, 3584), jnp.bfloat16),
            ((O, 3584), dtype),
            ((O, 3584 // group), jnp.float32),
        )
    )
    sizes = plan.tuning_of(rows, O, 3584, group < 3584)._replace(shares=1)
    run = jax.jit(lambda x, w, s: mosaic_gpu.scaled_matmul(x, w, s, group, "token", tuning=sizes))
    text = run.trace(x, w, s).lower(lowering_platforms=("cuda",)).as_text()
    rounds = rows <= 256 and group == 3584 and dtype != "int8"
    assert text.count("mosaic_gpu_v2") == 1 + rounds


@given(
    T=st.integers(1, 9000),
    O=st.integers(1, 5000).map(lambda x: 8 * x),
    I=st.integers(1, 200).map(lambda x: 128 * x),
    grouped=st.booleans(),
)
@settings(max_examples=60)
def test_any_sizes_have_a_plan_that_fits_the_card(T: int, O: int, I: int, grouped: bool) -> None:
    sizes = plan.tuning_of(T, O, I, grouped)
    assert sizes.tokens in plan.TOKENS and (not grouped or sizes.tokens <= plan.PROMOTED)
    slot = (sizes.tokens + sizes.warpgroups * ROWS) * plan.K + 4 * sizes.tokens
    staged = 2 * min(sizes.tokens, STAGED) * ROWS * sizes.warpgroups
    assert sizes.stages >= 3 and sizes.stages * slot + staged <= plan.SHARED_BYTES
    assert 1 <= sizes.shares <= I // plan.K


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("product", LAYER_SHAPES)
def test_most_processors_stream_a_models_weights_at_decode(product: str, rows: int) -> None:
    """Slots of the busiest processor against the mean."""
    O, I = LAYER_SHAPES[product]
    sizes = plan.tuning_of(rows, O, I, False)
    spec = mosaic_gpu._Spec(rows, O, I, jnp.bfloat16, jnp.float8_e4m3fn, False, sizes, None).split
    busy = [0] * PROCESSORS
    for unit in range(spec.units):
        beyond = max(0, unit - spec.whole) % sizes.shares
        edges = [spec.steps * (beyond + i) // sizes.shares for i in range(2)]
        busy[unit % PROCESSORS] += spec.steps if unit < spec.whole else edges[1] - edges[0]
    assert sum(busy) == spec.down * spec.steps
    assert max(busy) * PROCESSORS < 1.7 * sum(busy)


W8, SCALE = np.ones((128, 256), jnp.float8_e4m3fn), np.ones((128, 1), np.float32)


@pytest.mark.parametrize(
    ("x", "w", "group", "inputs", "message"),
    [
        ((0, 256), W8, 256, "token", r"x \[T, I\] and w \[O, I\]"),
        ((2, 200), W8[:, :200], 200, "plain", "plain inputs with O a multiple of 8 and I of 128"),
        ((2, 256), W8[:12], 256, "plain", "plain inputs with O a multiple of 8 and I of 128"),
        ((2, 256), W8.astype(jnp.bfloat16), 256, "token", "w bfloat16"),
        ((2, 256), W8[:12], 256, "token", "O a multiple of 8"),
        ((2, 192), W8[:, :192], 192, "token", "I of 128"),
        ((2, 256), W8, 64, "group", "groups of 128 columns, got 64"),
    ],
    ids=["rows", "plain", "plain outputs", "type", "outputs", "columns", "group"],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(
    x: tuple[int, ...], w: jax.Array, group: int, inputs: str, message: str
) -> None:
    scale = jnp.ones((w.shape[0], w.shape[1] // group))
    with pytest.raises(ValueError, match=message):
        BACKENDS["mosaic_gpu"](jnp.zeros(x, jnp.bfloat16), w, scale, group, inputs)


def test_the_kernel_multiplies_few_rows_and_groups() -> None:
    assert [plan.is_faster(rows, grouped=False) for rows in (1, 64, 65)] == [True, True, False]
    assert plan.is_faster(65, grouped=True)


def test_what_the_kernel_does_not_take_goes_to_the_reference() -> None:
    def chosen(groups: int, target: Target = H200) -> str:
        x, scale = jnp.zeros((2, 256), jnp.bfloat16), jnp.ones((128, groups))
        return choose(target, x, W8, scale, 256 // groups, "token")

    assert chosen(1) == chosen(2) == "mosaic_gpu"
    assert chosen(4) == "reference"  # groups of 64
    assert chosen(1, TPU) == chosen(1, PORTABLE) == "reference"


@places
@pytest.mark.parametrize("columns", [256, 18944])
def test_rounded_rows_are_those_of_the_definition(place: str, columns: int) -> None:
    shape = pick(place, 2, 256), columns
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16).at[0].set(0)
    assert mosaic_rounding.takes(x, jnp.float8_e4m3fn)
    run = functools.partial(mosaic_rounding.rounded_rows, **launch_options(place))
    rows = jax.jit(run)(x)
    numbers, scale = np.asarray(rows.numbers, np.float32), np.asarray(rows.scale)
    wanted, wanted_scale = rounded(x, jnp.float8_e4m3fn, columns)
    np.testing.assert_allclose(scale[:, None], wanted_scale, rtol=1e-6)
    # A card's division is not exact, so that a number halfway may go the other way
    assert np.mean(numbers != np.asarray(wanted, np.float32)) < pick(place, 1e-9, 1e-3)
    assert (numbers[0] == 0).all() and np.abs(numbers[1:]).max(axis=1).min() == 448


@pytest.mark.parametrize(
    ("rows", "columns", "taken"),
    [
        (1, 128, True),
        (256, 28672, True),
        (0, 128, False),
        (8448, 128, True),
        (1, 100, False),
        (1, 40960, False),
    ],
)
def test_rows_that_the_rounding_kernel_takes(rows: int, columns: int, taken: bool) -> None:
    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    assert mosaic_rounding.takes(x, jnp.dtype("float8_e4m3fn")) == taken  # type: ignore[arg-type]
    assert not mosaic_rounding.takes(x, jnp.dtype("int8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", plan.TOKENS)
def test_copies_begin_where_the_copy_engine_can_write(tokens: int) -> None:
    sizes = plan.tuning_of(tokens, 512, 1024, grouped=True)
    spec = mosaic_gpu._Spec(
        tokens, 512, 1024, jnp.bfloat16, jnp.float8_e4m3fn, True, sizes, interpret=None
    )
    scratch = mosaic_gpu._scratch(spec)
    assert scratch["scales"].shape[1] * 4 % 128 == 0
    assert scratch["scales"].shape[1] >= sizes.tokens
