"""The gated product on the CPU: its back ends against float64, the Hopper one interpreted with race
detection and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import UnknownBackend
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
from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, registers_of
from pallas_kernels.target import PORTABLE
from tests.pallas_kernels.places import jitted
from tests.targets import H200, TPU

# Sizes under which the small cases have several tiles, bands, turns of the ring and units of a
# block.
SMALL = {
    "one token": Tuning(64, 32, 2, 1),
    "a row more than a tile of eight": Tuning(64, 48, 2, 2),  # the last tile hangs over
    "one class exactly": Tuning(64, 48, 3, 2),
    "two classes": Tuning(128, 32, 2, 1),
    "three warpgroups": Tuning(192, 32, 2, 2),
    "a wide class": Tuning(256, 32, 2, 2),
    "several bands, the last cut": Tuning(128, 48, 2, 2),
    "the smallest": None,
}
ROWS = (64, 96, 160, 256, 512, 640, 2048)
gatings = pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])


def relative_error(out: jax.Array, wanted: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `wanted`; NaN stays NaN and fails every
    comparison.
    """
    return float(np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted))


def rounded(case: Case, dtype: str, gating: Gated) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """The inputs of a case in `dtype`, and the product of what they were rounded to."""
    x, w = (jnp.asarray(a, dtype) for a in inputs(case))
    return x, w, expected(np.asarray(x), np.asarray(w), gating)


@gatings
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_reference_equals_the_product_in_float64(case: Case, gating: Gated) -> None:
    x, w, wanted = rounded(case, "float32", gating)
    assert relative_error(gated_matmul(x, w, gating=gating, backend="reference"), wanted) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_interpreted_kernel_equals_the_product_in_float64(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", 4)  # so that blocks do several units
    monkeypatch.setattr(mosaic_gpu, "BAND_GROUP", 2)
    gating = GELU if case.name in ("one token", "two classes") else SILU
    dtype = "float16" if case.name == "two classes" else "bfloat16"
    x, w, wanted = rounded(case, dtype, gating)
    out = mosaic_gpu.gated_matmul(
        *(x, w, gating),
        tuning=SMALL[case.name],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert out.shape == wanted.shape and out.dtype == x.dtype
    assert relative_error(out, wanted) < 5e-3


@pytest.mark.parametrize(("together", "bands"), [(1, 5), (2, 5), (3, 5), (8, 5), (2, 4), (8, 1)])
def test_every_tile_is_one_units(
    together: int, bands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu, "BAND_GROUP", together)
    monkeypatch.setattr(mosaic_gpu.lax, "axis_index", lambda name: jnp.int32(0))
    sizes = Tuning(64, 32, 2, 1)
    spec = mosaic_gpu._Spec(bands * 64, 7 * 16, 64, jnp.bfloat16, SILU, sizes, None)
    found = [
        tuple(map(int, mosaic_gpu._tile_of(spec, jnp.int32(unit)))) for unit in range(7 * bands)
    ]
    assert sorted(found) == [(across, band) for across in range(7) for band in range(bands)]
    assert len({band for _, band in found[: 7 * min(together, bands)]}) <= min(together, bands)


@gatings
def test_extreme_gates_give_no_nan(gating: Gated) -> None:
    x, w = (
        jnp.full((8, 64), 30.0, jnp.bfloat16),
        jnp.concatenate([jnp.full((8, 64), -30.0), jnp.ones((8, 64))]).astype(jnp.bfloat16),
    )
    params = plgpu.InterpretGPUParams(detect_races=True)
    none, wide = (
        np.asarray(
            mosaic_gpu.gated_matmul(
                x, sign * w, gating, tuning=Tuning(64, 16, 2, 1), interpret=params
            ),
            np.float32,
        )
        for sign in (1, -1)
    )
    assert not none.any()
    assert np.isfinite(wide).all() and (wide < 0).all()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rows, marks=[] if rows in (ROWS[0], ROWS[-1]) else pytest.mark.slow)
        for rows in ROWS
    ],
)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_the_kernel_lowers_for_cuda(model: str, rows: int) -> None:
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, MODEL_SHAPES[model][1]), MODEL_SHAPES[model])
    )
    lowered = (
        jitted(mosaic_gpu.gated_matmul).trace(x, w, gating=SILU).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("O", "I", "rows"),
    [(2 * 5464, 4096, 64), (2 * 13656, 4096, 2048), (2 * 104, 64, 2000), (9728, 896, 160)],
)
def test_widths_that_no_wide_copy_divides_lower_too(O: int, I: int, rows: int) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, I), (O, I)))
    assert (
        "mosaic_gpu_v2"
        in jitted(mosaic_gpu.gated_matmul)
        .trace(x, w, gating=SILU)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.parametrize("rows", [1, *ROWS, 8448])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_the_sizes_fit_the_card(model: str, rows: int) -> None:
    tuning = plan.tuning_of(rows, *MODEL_SHAPES[model])
    height, width, groups = tuning.rows // tuning.warpgroups, tuning.n // 2, tuning.warpgroups
    staged = tuning.rows * plan.chunk_of(height, width, groups, MODEL_SHAPES[model][0] // 2) * 2
    assert tuning.stages * (tuning.rows + tuning.n) * plan.K * 2 + staged <= plan.SHARED_BYTES
    assert tuning.n <= plan.MAX_N[tuning.rows] and tuning.n % 16 == 0 and tuning.stages >= 4
    registers = registers_of(groups)
    assert 128 * (groups * registers + PRODUCER_REGISTERS) <= 65536
    assert height * tuning.n // 128 < registers - 40, "sums leave registers for the rest"


def test_measured_sizes_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plan, "_measured", lambda: {"64x128x7": {"rows": 64, "n": 16, "stages": 3, "cluster": 1}}
    )
    plan.tuning_of.cache_clear()
    assert plan.tuning_of(7, 64, 128) == Tuning(64, 16, 3, 1)
    assert plan.tuning_of(8, 64, 128) != Tuning(64, 16, 3, 1)
    plan.tuning_of.cache_clear()


def test_the_kernel_is_used_where_it_pays() -> None:
    x, w = jnp.zeros((64, 3584), jnp.bfloat16), jax.ShapeDtypeStruct((37888, 3584), jnp.bfloat16)
    assert find(H200, x, w, SILU) == "mosaic_gpu"  # type: ignore[arg-type]
    assert find(H200, x[:32], w, SILU) is None  # type: ignore[arg-type]
    assert find(TPU, x, w, SILU) is None  # type: ignore[arg-type]
    assert find(PORTABLE, x, w, SILU) is None  # type: ignore[arg-type]
    assert find(H200, x.astype(jnp.float32), w, SILU) is None  # type: ignore[arg-type]
    small = 6144 * 1024 * 2
    assert (
        plan.is_faster(256, small),
        plan.is_faster(2048, small),
        plan.is_faster(2048, 1 << 20),
    ) == (
        False,
        True,
        False,
    )
    assert [plan.is_faster(rows, 1 << 30) for rows in (63, 64, 256, 257, 1023, 1024)] == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        ((1, 65), (16, 65), "I of 64"),
        ((1, 64), (24, 64), "O a multiple of 16"),
        ((1, 64), (16, 128), "x \\[M, I\\]"),
        ((0, 64), (16, 64), "x \\[M, I\\]"),
    ],
)
def test_what_the_kernel_does_not_take_is_an_error(
    x: tuple[int, int], w: tuple[int, int], said: str
) -> None:
    given = (jnp.zeros(shape, jnp.bfloat16) for shape in (x, w))
    with pytest.raises(ValueError, match=said):
        gated_matmul(*given, gating=SILU, backend="mosaic_gpu")


def test_float32_and_unknown_back_ends_are_errors() -> None:
    x, w = jnp.zeros((1, 64)), jnp.zeros((16, 64))
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        gated_matmul(x, w, gating=SILU, backend="mosaic_gpu")
    with pytest.raises(UnknownBackend, match="gated_matmul has no back end 'cuda'"):
        gated_matmul(x, w, gating=SILU, backend="cuda")
