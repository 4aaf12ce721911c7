"""The few-token product on the CPU: its back ends against float64, the Hopper one interpreted with race detection and lowered for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.matmul import gated_matmul, matmul, mosaic_gpu, plan
from pallas_kernels.matmul.cases import CASES, MODEL_SHAPES, Case, inputs
from pallas_kernels.matmul.plan import Tuning

# Sizes under which the small cases have several tiles, parts of K, warpgroups and turns of the ring.
SMALL = {
    "one token": Tuning(32, 64, 2),
    "a row more than a class": Tuning(32, 64, 2, 2),  # the last tile hangs over
    "one class exactly": Tuning(48, 128, 2, 2),
    "half a tile": Tuning(64, 64, 2, 1, 2),
    "two tiles": Tuning(48, 64, 2, 2, 2, 2),
    "four tiles": Tuning(32, 64, 2, 1, 2, 2),
    "float32 logits": Tuning(16, 64, 3),
    "the smallest": None,
}


def relative_error(out: jax.Array, wanted: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `wanted`; NaN stays NaN and fails every comparison."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted))


def rounded(case: Case, dtype: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """The inputs of a case in `dtype`, and the product of what they were rounded to."""
    given = inputs(case)
    x, w = jnp.asarray(given.x, dtype), jnp.asarray(given.w, dtype)
    return x, w, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_reference_equals_the_product_in_float64(case: Case) -> None:
    given = inputs(case)
    out = matmul(jnp.asarray(given.x), jnp.asarray(given.w), backend="reference", out_dtype=case.out_dtype)
    assert out.dtype == jnp.float32
    assert relative_error(out, given.expected) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_interpreted_kernel_equals_the_product_in_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", 4)  # so that blocks do several units
    x, w, wanted = rounded(case, "float16" if case.name == "half a tile" else "bfloat16")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = mosaic_gpu.matmul(x, w, out_dtype=case.out_dtype, tuning=SMALL[case.name], interpret=interpret)
    assert out.shape == wanted.shape
    assert out.dtype == (case.out_dtype or x.dtype)
    assert relative_error(out, wanted) < (1e-5 if case.out_dtype else 5e-3)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (Case(name="one token", tokens=1, outputs=128, inputs=192), Tuning(32, 64, 2)),
        (Case(name="two warpgroups and an overhang", tokens=20, outputs=144, inputs=192), Tuning(64, 64, 2, 1, 2, 2)),
        (Case(name="two tiles", tokens=100, outputs=96, inputs=192), Tuning(32, 64, 2, 1, 2)),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_the_gated_product_multiplies_the_activated_gate_with_the_rest(case: Case, tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", 4)
    x, w, both = rounded(case, "bfloat16")
    gate, up = np.split(both, 2, axis=1)
    wanted = gate / (1 + np.exp(-gate)) * up
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    assert relative_error(mosaic_gpu.gated_matmul(x, w, tuning=tuning, interpret=interpret), wanted) < 5e-3
    assert relative_error(gated_matmul(x, w, backend="reference"), wanted) < 5e-3


@pytest.mark.parametrize("tokens", [1, 16, 33, 100, 256])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_the_gated_kernel_lowers_for_cuda(model: str, tokens: int) -> None:
    shape = MODEL_SHAPES[model][2]
    x, w = jax.ShapeDtypeStruct((tokens, shape[1]), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    following = jax.ShapeDtypeStruct(MODEL_SHAPES[model][3], jnp.bfloat16)
    lowered = mosaic_gpu.gated_jitted.trace(x, w, following=following).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


def test_fetching_the_next_weight_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_gpu, "PROCESSORS", 4)
    x, w, wanted = rounded(CASES[2], "bfloat16")
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    for following in (jnp.zeros((328, 192), w.dtype), jnp.zeros((60, 100), w.dtype), jnp.zeros((64, 64), jnp.float32)):
        out = mosaic_gpu.matmul(x, w, following=following, tuning=SMALL[CASES[2].name], interpret=interpret)
        assert relative_error(out, wanted) < 5e-3


@pytest.mark.parametrize("tokens", [1, 16, 33, 100, 256])
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_the_kernel_lowers_for_cuda_at_every_shape_of_the_models(model: str, tokens: int) -> None:
    for shape in MODEL_SHAPES[model]:
        x, w = jax.ShapeDtypeStruct((tokens, shape[1]), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        out_dtype = jnp.float32 if shape == MODEL_SHAPES[model][-1] else None
        following = None if out_dtype else jax.ShapeDtypeStruct(MODEL_SHAPES[model][2], jnp.bfloat16)
        lowered = mosaic_gpu.jitted.trace(x, w, out_dtype=out_dtype, following=following).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("rows", plan.ROW_CLASSES)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_the_sizes_fit_into_shared_memory(model: str, rows: int) -> None:
    for O, K in MODEL_SHAPES[model]:  # noqa: E741
        _fits(plan.tuning_of(rows, O, K), rows, K)
    gated = plan.tuning_of(rows, *MODEL_SHAPES[model][2], 2)
    _fits(gated, rows, MODEL_SHAPES[model][2][1])
    assert gated.split == 1


def _fits(tuning: Tuning, rows: int, K: int) -> None:
    ring = tuning.stages * (max(rows, 64) + tuning.n) * tuning.k * 2
    assert ring + plan.STAGING_BYTES + 1024 <= plan.SHARED_BYTES
    assert tuning.stages >= 3
    assert K % tuning.k == 0 and tuning.split <= K // tuning.k


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (((2, 64), "float32"), ((64, 64), "float32"), "bfloat16 or float16"),
        (((2, 64), "bfloat16"), ((64, 64), "float16"), "bfloat16 or float16"),
        (((2, 96), "bfloat16"), ((64, 96), "bfloat16"), "I a multiple of 64"),
        (((2, 64), "bfloat16"), ((60, 64), "bfloat16"), "O a multiple of 8"),
        (((257, 64), "bfloat16"), ((64, 64), "bfloat16"), "1 to 256 rows"),
        (((2, 128), "bfloat16"), ((64, 64), "bfloat16"), r"x \[M, I\] and w \[O, I\]"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error_that_says_so(x: tuple, w: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        matmul(jnp.zeros(*x), jnp.zeros(*w), backend="mosaic_gpu")


def test_an_unknown_back_end_is_an_error_that_names_those_that_exist() -> None:
    with pytest.raises(UnknownBackend, match="reference, mosaic_gpu"):
        matmul(jnp.zeros((1, 64)), jnp.zeros((64, 64)), backend="cublas")
