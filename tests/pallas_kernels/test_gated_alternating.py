"""The gated product whose rows of gate and up alternate: in the interpreter and on a card, how its
threads hold the two, its sizes, and where it is chosen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul import (
    GELU,
    SILU,
    Gated,
    backend_for,
    gated_matmul,
    is_faster,
    mosaic_alternating,
    mosaic_gpu,
    plan,
)
from pallas_kernels.gated_matmul.cases import MODEL_SHAPES, Case, expected, inputs
from pallas_kernels.gated_matmul.mosaic_alternating import HALF, OUTPUTS, STRIP, staged_of
from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.matmul.plan import SHARED_BYTES, TILES
from pallas_kernels.mosaic_units import ROWS
from tests.pallas_kernels.places import (
    CARD,
    jitted,
    launch_options,
    pick,
    places,
    poison_outputs,
    relative_error,
)

ERROR = {"bfloat16": 5e-3, "float16": 1e-3}
ROWS_OF_A_STEP = (513, 520, 528, 544)
LARGE = {name: shape for name, shape in MODEL_SHAPES.items() if shape[0] * shape[1] >= 32 << 20}
gatings = pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])
reference = jax.jit(functools.partial(gated_matmul, backend="reference"), static_argnames="gating")


def of(name: str, tokens: int, outputs: int, inputs: int) -> Case:
    """A case with so many outputs of gate and of up."""
    return Case(name=name, tokens=tokens, outputs=2 * outputs, inputs=inputs)


SMALL = [
    (of("three warpgroups", 9, 96, 192), Tuning(16, 3, 64, 2, 1)),
    (of("tokens and outputs cut", 150, 40, 128), Tuning(80, 1, 64, 2, 1)),
    (of("a warpgroup without rows", 72, 104, 128), Tuning(72, 2, 64, 3, 1)),
    (of("the smallest", 3, 8, 64), None),
]


def launched(
    place: str, case: Case, dtype: str, gating: Gated, tuning: Tuning | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product, with an output that starts as NaN, and the right one."""
    x, w = (jnp.asarray(a, dtype) for a in inputs(case))
    poison_outputs(place, jax.ShapeDtypeStruct((case.tokens, case.outputs // 2), x.dtype))
    run = jitted(mosaic_alternating.gated_matmul)
    got = np.asarray(run(x, w, gating=gating, tuning=tuning, **launch_options(place)))
    assert got.dtype == x.dtype
    return got, expected(np.asarray(x), np.asarray(w), gating)


@places
@gatings
@pytest.mark.parametrize(("case", "tuning"), SMALL, ids=[case.name for case, _ in SMALL])
def test_the_product_equals_float64(
    place: str, case: Case, tuning: Tuning | None, gating: Gated
) -> None:
    for dtype in pick(place, ["bfloat16" if gating is SILU else "float16"], ERROR):
        for sizes in pick(place, [tuning], [tuning, None]):
            got, wanted = launched(place, case, dtype, gating, sizes)
            assert got.shape == wanted.shape
            assert relative_error(got, wanted) < ERROR[dtype], dtype


def test_results_are_staged_in_parts_where_there_is_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, tuning = of("parts", 50, 40, 128), Tuning(56, 1, 64, 2, 1)
    slots = 2 * 2 * 64 * (56 + ROWS)
    monkeypatch.setattr(mosaic_alternating, "SHARED_BYTES", slots + 2 * OUTPUTS * 24)
    assert staged_of(tuning) == 24
    got, wanted = launched("interpreter", case, "bfloat16", SILU, tuning)
    assert relative_error(got, wanted) < ERROR["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS_OF_A_STEP)
@pytest.mark.parametrize("model", LARGE)
def test_a_models_shape_equals_the_reference_on_a_card(model: str, rows: int) -> None:
    O, I = MODEL_SHAPES[model]  # noqa: E741
    gating = GELU if "Gemma" in model else SILU
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, I), jnp.bfloat16)
    w = jax.random.normal(keys[1], (O, I), jnp.bfloat16) / I**0.5
    poison_outputs(CARD, jax.ShapeDtypeStruct((rows, O // 2), x.dtype))
    found = jitted(mosaic_gpu.gated_matmul)(x, w, gating=gating)
    assert relative_error(found, reference(x, w, gating=gating)) < 5e-3


def places_of(layout: Any, shape: tuple[int, int]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Warp, lane, register and number in it of each element, as the layout defines them."""
    tiled, registers = layout.tiling.tile_shape(shape), layout.registers_shape(shape)
    found = {}
    for element in np.ndindex(*shape):
        index = list(layout.tiling.tile_indices(element))
        number = index[layout.vector_dim]
        warp, lane = 0, 0
        for dim in layout.warp_dims:
            warp, index[dim] = warp * tiled[dim] + index[dim], 0
        for dim in layout.lane_dims:
            lane, index[dim] = lane * tiled[dim] + index[dim], 0
        index[layout.vector_dim] = 0
        found[element] = warp, lane, int(np.ravel_multi_index(index, registers)), number
    return found


@pytest.mark.parametrize("tokens", [8, 40, 136])
def test_a_thread_that_has_a_gate_has_its_up_and_keeps_both(tokens: int) -> None:
    product = places_of(plgpu.Layout.WGMMA.to_mgpu(), (ROWS, tokens))
    half = places_of(HALF.to_mgpu(), (OUTPUTS, tokens))
    count = 1 + max(register for _, _, register, _ in product.values())
    shape = plgpu.Layout.WGMMA.to_mgpu().registers_shape((ROWS, tokens))
    numbered = np.arange(count).reshape(shape)
    for part, kept in enumerate(mosaic_alternating.registers_apart(numbered)):
        assert kept.shape == HALF.to_mgpu().registers_shape((OUTPUTS, tokens))
        for (output, token), (warp, lane, register, number) in half.items():
            row = output // STRIP * 2 * STRIP + part * STRIP + output % STRIP
            held = warp, lane, int(kept.flat[register]), number
            assert product[row, token] == held, (part, output, token)


@pytest.mark.parametrize("model", LARGE)
def test_the_kernel_lowers_for_cuda_and_is_the_one_that_is_taken(model: str) -> None:
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((544, MODEL_SHAPES[model][1]), MODEL_SHAPES[model])
    )
    assert backend_for("mosaic_gpu", x, w, SILU) == "mosaic_gpu"  # type: ignore[arg-type]
    traced = jitted(mosaic_gpu.gated_matmul).trace(x, w, gating=SILU)
    assert "name=gated_matmul_544x" in str(traced.jaxpr)
    assert f"[2,{w.shape[0] // 2 // STRIP},{STRIP},{w.shape[1]}]" in str(traced.jaxpr)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@settings(max_examples=100)
@given(
    T=st.integers(1, 576),
    F=st.integers(1, 3000).map(lambda n: 8 * n),
    I=st.integers(1, 80).map(lambda n: 64 * n),
)
def test_sizes_fit_the_card_beside_what_is_staged(T: int, F: int, I: int) -> None:  # noqa: E741
    sizes = mosaic_alternating.tuning_of(T, 2 * F, I)
    tokens, warpgroups, columns, stages, shares, joined = sizes
    assert shares == 1 and not joined and tokens % 8 == 0 and stages >= 4
    assert tokens <= next((most for most, held in TILES if held == warpgroups), 64)
    staged = staged_of(sizes)
    assert staged % 8 == 0 and 8 <= staged <= tokens
    slots = stages * 2 * columns * (tokens + warpgroups * ROWS)
    assert slots + 2 * OUTPUTS * warpgroups * staged <= SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "mib", "taken"),
    [(512, 64, 0), (513, 64, 1), (544, 512, 1), (545, 512, 0), (544, 63, 0)],
)
def test_rows_for_which_tiles_of_128_are_nearly_empty_are_taken(
    rows: int, mib: int, taken: int
) -> None:
    assert plan.alternates(rows, mib << 20) == is_faster(rows, mib << 20) == bool(taken)
