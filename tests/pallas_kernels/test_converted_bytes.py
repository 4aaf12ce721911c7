"""Products of 16-bit tokens with weights of 8 bits: the kernel in the interpreter and on a card, of
one weight and of experts, and the assembly that makes its operand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import by_tile, group
from pallas_kernels.grouped_matmul.cases import choices
from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.parts import whole
from pallas_kernels.scaled_matmul import (
    BACKENDS,
    ScaledExperts,
    find_grouped,
    grouped_scaled_matmul,
    mosaic_converted,
    mosaic_gpu,
    plan,
    scaled_matmul,
    scaled_parts,
    scaled_sums,
)
from pallas_kernels.scaled_matmul.cases import Case, expected, inputs
from pallas_kernels.scaled_matmul.conversion import conversion
from pallas_kernels.scaled_matmul.mosaic_grouped import grouped_scaled_matmul as grouped_kernel
from tests.pallas_kernels.operand_lanes import Lanes
from tests.pallas_kernels.places import (
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)
from tests.targets import H200

plain = functools.partial(Case, inputs="plain")
CASES = (
    plain(name="one token", tokens=1, outputs=64, columns=256),
    plain(name="integers, rows that no block divides", tokens=20, outputs=200, columns=640),
    plain(name="rows of eights", tokens=9, outputs=136, columns=384, integers=True),
    plain(name="groups of 128", tokens=70, outputs=320, columns=512, group=128),
    plain(name="groups of 64", tokens=5, outputs=64, columns=384, group=64, integers=True),
    plain(name="groups of 32, two bands", tokens=300, outputs=64, columns=256, group=32),
    plain(name="groups of 16", tokens=9, outputs=72, columns=128, group=16, integers=True),
    plain(name="groups of 256, cut off", tokens=33, outputs=128, columns=384, group=256),
    plain(name="many integers", tokens=300, outputs=192, columns=256, integers=True),
)
SMALL = [
    (plain(name="rows", tokens=3, outputs=72, columns=384, integers=True), Tuning(8, 1, 128, 2, 2)),
    (plain(name="groups", tokens=9, outputs=128, columns=256, group=64), Tuning(16, 2, 128, 2, 1)),
]
ERROR = {"bfloat16": 5e-3, "float16": 1e-3}


def launched(place: str, case: Case, dtype: str, tuning: Tuning | None = None) -> tuple[Any, Any]:
    """The kernel's product and the one that is wanted; an output starts as NaN."""
    own = inputs(case)
    own = own._replace(x=np.asarray(jnp.asarray(own.x, dtype), np.float32))
    poison_outputs(place, jax.ShapeDtypeStruct((case.tokens, case.outputs), dtype))
    kernel = functools.partial(
        mosaic_converted.scaled_parts,
        group=case.group or case.columns,
        tuning=tuning,
        **launch_options(place),
    )
    arrays = jnp.asarray(own.x, dtype), jnp.asarray(own.weight), jnp.asarray(own.scale)
    got = jax.jit(lambda *given: whole(kernel(*given)))(*arrays)
    assert got.shape == (case.tokens, case.outputs) and got.dtype == jnp.dtype(dtype)
    return got, expected(case, own)


@places
@pytest.mark.parametrize("at", [0, 1], ids=["rows", "groups"])
def test_the_product_equals_float64(place: str, at: int) -> None:
    for case in pick(place, [SMALL[at][0]], CASES):
        for dtype in pick(place, ["bfloat16"], ERROR):
            got, wanted = launched(place, case, dtype, pick(place, SMALL[at][1], None))
            assert relative_error(got, wanted) < ERROR[dtype], (case.name, dtype)


SUMS = [
    (
        plain(name="shares", tokens=3, outputs=72, columns=384, integers=True),
        Tuning(8, 1, 128, 2, 2),
    ),
    (
        plain(name="rows of eights", tokens=9, outputs=136, columns=256, group=16, integers=True),
        Tuning(16, 2, 128, 2, 1),
    ),
    (
        plain(name="two bands", tokens=20, outputs=64, columns=128, group=32, integers=True),
        Tuning(16, 1, 128, 2, 1),
    ),
    (
        plain(name="blocks that fill a card, and shares", tokens=2, outputs=64 * 133, columns=256),
        Tuning(8, 1, 128, 2, 2),
    ),
]


@places
@pytest.mark.parametrize("at", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_are_not_rounded(place: str, at: int) -> None:
    case, tuning = SUMS[at]
    own, group = inputs(case), case.group or case.columns
    x, w = jnp.asarray(own.x, jnp.bfloat16), jnp.asarray(own.weight)
    scale = jnp.asarray(own.scale, jnp.float16 if group <= 32 else jnp.float32)
    poison_outputs(place, jax.ShapeDtypeStruct((case.tokens, case.outputs), jnp.float32))
    kernel = functools.partial(
        mosaic_converted.scaled_sums,
        group=group,
        tuning=pick(place, tuning, None),
        **launch_options(place),
    )
    got = jax.jit(kernel)(x, w, scale)
    assert got.shape == (case.tokens, case.outputs) and got.dtype == jnp.float32
    wanted = scaled_sums(x, w, scale, group=group, inputs="plain", backend="reference")
    assert relative_error(got, wanted) < 2e-6
    rounded = np.asarray(got).astype(jnp.bfloat16).astype(np.float32)
    assert relative_error(rounded, wanted) > 1e-3  # so that rounding would be found


@places
def test_integers_with_zero_points_are_multiplied_less_these(place: str) -> None:
    case = Case(name="", tokens=3, outputs=72, columns=384, inputs="shifted", integers=True)
    own = inputs(case)
    own = own._replace(x=np.asarray(jnp.asarray(own.x + 1, "bfloat16"), np.float32))
    x, options = jnp.asarray(own.x, "bfloat16"), launch_options(place)
    kernel = functools.partial(
        mosaic_gpu.scaled_matmul, group=384, inputs=case.inputs, interpret=options.get("interpret")
    )
    got = jax.jit(kernel)(x, own.weight, own.scale)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, expected(case, own)) < ERROR["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_right_in_the_interpreter(case: Case) -> None:
    got, wanted = launched("interpreter", case, "bfloat16")
    assert relative_error(got, wanted) < ERROR["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("columns", [None, 32, 128])
@pytest.mark.parametrize("product", ["qkv", "down"])
def test_a_models_shape_equals_the_reference_on_a_card(
    product: str, columns: int | None, rows: int
) -> None:
    O, I = LAYER_SHAPES[product]
    case = plain(
        name=product, tokens=rows, outputs=O, columns=I, group=columns, integers=columns == 32
    )
    own = inputs(case)
    arrays = jnp.asarray(own.x, jnp.bfloat16), jnp.asarray(own.weight), jnp.asarray(own.scale)
    wanted, got = (
        jax.jit(functools.partial(scaled_matmul, group=columns or I, inputs="plain", backend=name))(
            *arrays
        )
        for name in BACKENDS
    )
    assert relative_error(got, wanted) < 5e-3


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("integers", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_the_assembly_makes_the_operand_of_the_tensor_cores(
    groups: int, integers: bool, dtype: str
) -> None:
    """Every number of 8 bits, in 64 rows of which the second half of a slot is made."""
    rng, first, columns = np.random.default_rng(0), 64, 64
    numbers = np.concatenate([rng.permutation(256) for _ in range(32)]).reshape(64, 128)
    kind = jnp.int8 if integers else jnp.float8_e4m3fn
    w = numbers.astype(np.uint8).view(kind)
    nan = np.where(numbers == 255, -480, 480)  # which no checkpoint has
    exact = np.where(np.isnan(w.astype(np.float32)), nan, w.astype(np.float32))
    scale = rng.uniform(1e-4, 2, (64, max(groups, 1))).astype(np.float32)
    # As the copy engine leaves rows of 128 bytes: sixteen bytes are where the row's number says
    pieces = w.view(np.uint8).reshape(64, 8, 16)
    swizzled = np.stack([row[np.arange(8) ^ i % 8] for i, row in enumerate(pieces)])
    lanes, lane = Lanes(dtype), np.arange(128)
    row = lane // 32 * 16 + lane % 32 // 4
    for i in range(groups):
        for half in range(2):
            place = f"${columns // 4 + 1 + 2 * i + half}"
            lanes.held[place] = scale[row + 8 * half, i].view(np.uint32)
    text = conversion(first, columns, groups, dtype, integers)
    registers = lanes.run(text, [swizzled], columns // 4)
    got = registers.view(np.dtype(dtype)).reshape(4, 8, 4, columns // 16, 2, 2, 2)
    # warp, g, c, step, further, half, odd → rows and columns
    rows = got.transpose(0, 5, 1, 3, 4, 2, 6).reshape(64, columns)
    own = exact[:, first : first + columns]
    if groups:
        own = own * np.repeat(scale, columns // groups, axis=1)
    np.testing.assert_array_equal(rows, own.astype(np.dtype(dtype)))


EXPERTS, CHOICES = 5, 2


@places
@pytest.mark.parametrize(
    "gating", [SILU, pytest.param(None, marks=pytest.mark.slow)], ids=("gated", "plain")
)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner", "columns", "integers"),
    [
        (3, 384, 128, None, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (1, 128, 128, None, True),
                (40, 192, 256, 128, False),
                (40, 128, 128, 32, True),
                (200, 256, 256, None, True),
            )
        ),
    ],
)
def test_rows_meet_the_weight_of_their_expert(
    place: str,
    tokens: int,
    outputs: int,
    inner: int,
    columns: int | None,
    integers: bool,
    gating: Any,
) -> None:
    case = plain(
        name="", tokens=tokens, outputs=outputs, columns=inner, group=columns, integers=integers
    )
    w, x = experts(case), jnp.asarray(inputs(case).x, jnp.bfloat16)
    expert = choices(tokens, EXPERTS, CHOICES, 1.0, np.random.default_rng(0))
    groups = group(jnp.asarray(expert), EXPERTS)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(EXPERTS, outputs)), jnp.bfloat16)
    call = functools.partial(grouped_kernel, gating=gating, **launch_options(place))
    got = np.asarray(jax.jit(call)(x, w, groups, bias))

    def product(x_RI: jax.Array, e: jax.Array) -> jax.Array:
        values, scale = w.values[e], w.scale[e]
        return scaled_matmul(
            x_RI, values, scale, group=w.group, inputs="plain", backend="reference"
        )

    wanted = functools.partial(by_tile, product, groups=groups, bias_EO=bias, gating=gating)(x)
    rows = np.asarray(groups.place_TK).reshape(-1)  # others are arbitrary
    assert got.shape == wanted.shape
    assert relative_error(got[rows], np.asarray(wanted)[rows]) < 5e-3


def experts(case: Case) -> ScaledExperts:
    made = [inputs(case, seed) for seed in range(EXPERTS)]
    values, scale = (jnp.asarray(np.stack(part)) for part in list(zip(*made, strict=True))[1:3])
    return ScaledExperts(values, scale, case.group or case.columns, "plain")


def test_experts_whose_rows_fill_no_blocks_go_tile_by_tile() -> None:
    groups = group(jnp.zeros((3, 1), jnp.int32), EXPERTS)
    x = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16)
    for outputs, taken in ((128, True), (64, True), (96, False)):
        w = experts(plain(name="", tokens=3, outputs=outputs, columns=128))
        assert (find_grouped(H200, x, w, groups, None) is not None) == taken
    with pytest.raises(ValueError, match=r"O a multiple of 64, got \(96, 128\)"):
        grouped_scaled_matmul(jnp.zeros(x.shape, x.dtype), w, groups, backend="mosaic_grouped")


@given(
    T=st.integers(1, 5000),
    O=st.integers(1, 700).map(lambda x: 64 * x),
    I=st.integers(1, 150).map(lambda x: 128 * x),
)
@settings(max_examples=40)
def test_any_sizes_have_a_plan_that_fits_the_card(T: int, O: int, I: int) -> None:
    tokens, warpgroups, columns, stages, shares, _ = plan.converted_tuning(T, O, I)
    slot = 2 * tokens * columns + warpgroups * 64 * columns
    staged = 2 * min(tokens, 64) * 64 * warpgroups
    assert stages >= 2 and stages * slot + staged <= plan.SHARED_BYTES
    assert 1 <= shares <= -(-I // columns)


@pytest.mark.parametrize(("rows", "dense"), [(plan.DENSE_ROWS, True), (2048, False)])
def test_the_weight_is_xlas_for_very_many_rows(rows: int, dense: bool) -> None:
    x, w = (jax.ShapeDtypeStruct((n, 256), t) for n, t in ((rows, jnp.bfloat16), (128, jnp.int8)))
    scale = jax.ShapeDtypeStruct((128, 1), jnp.float32)
    call = functools.partial(scaled_parts, group=256, inputs="plain", backend="mosaic_gpu")
    assert ("dot_general" in str(jax.make_jaxpr(call)(x, w, scale))) == dense
    sums = functools.partial(scaled_sums, group=256, inputs="plain", backend="mosaic_gpu")
    made = jax.make_jaxpr(sums)(x, w, scale)
    assert ("dot_general" in str(made)) == dense
    assert made.out_avals[0].dtype == jnp.float32


@pytest.mark.parametrize(
    ("x", "w", "columns", "message"),
    [
        ((3, 192), "int8", 192, r"O a multiple of 8 and I of 128, got w \(64, 192\)"),
        ((3, 384), "int8", 96, "groups of .* or a multiple of 128, got 96"),
        ((3, 192), "uint8", 64, "float8_e4m3fn or int8, got x bfloat16, w uint8"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_with_the_reason(
    x: tuple[int, int], w: str, columns: int, message: str
) -> None:
    scale = jnp.ones((64, x[1] // columns))
    with pytest.raises(ValueError, match=message):
        BACKENDS["mosaic_gpu"](
            jnp.zeros(x, jnp.bfloat16), jnp.zeros((64, x[1]), w), scale, columns, "plain"
        )


def test_sums_of_inputs_that_are_to_be_rounded_are_refused() -> None:
    x, w = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((64, 128), jnp.int8)
    with pytest.raises(ValueError, match="scaled_sums takes plain inputs, got 'token'"):
        scaled_sums(x, w, jnp.ones((64, 1)), group=128, inputs="token", backend="mosaic_gpu")
