"""The Hopper back end of paged extend on the CPU: interpreted with race detection, lowered for CUDA, its work list checked by counting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_extend import mosaic_gpu, reference
from pallas_kernels.paged_extend.cases import CASES, Case, inputs
from pallas_kernels.paged_extend.plan import make_plan

SUPPORTED = [c for c in CASES if c.head_dim in (64, 128, 256) and c.page_size in (16, 32, 64, 128)]
QUICK = (
    Case(name="ragged, with tokens of no row", rows=((0, 70), (64, 1), (9, 66)), gap=3, heads=2, kv_heads=1),
    Case(name="a prefix, window and softcap", rows=((100, 140), (0, 0)), heads=1, kv_heads=1, page_size=64, window=100, softcap=5.0),
    Case(name="pages of 128, head_dim 128", rows=((130, 65),), heads=1, kv_heads=1, page_size=128, head_dim=128),
)
SMALL = mosaic_gpu.Tuning(keys=64)


def run(case: Case, tuning: mosaic_gpu.Tuning) -> float:
    """Error of the interpreted kernel against the reference on the same rounded inputs."""
    low = [jnp.asarray(a, "bfloat16" if a.dtype == np.float32 else None) for a in inputs(case).args]
    kernel = functools.partial(mosaic_gpu.extend_attention, tuning=tuning, interpret=plgpu.InterpretGPUParams(detect_races=True))
    out = jax.jit(functools.partial(kernel, **case.options))(*low)
    wanted = reference.extend_attention(*(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in low), **case.options)
    a, b = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # queries of no row hold anything
@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
def test_the_interpreted_kernel_equals_the_reference(case: Case) -> None:
    assert run(case, SMALL) < 5e-3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_one_compute_warpgroup_equals_the_reference() -> None:
    assert run(QUICK[0], SMALL._replace(groups=1)) < 5e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.name)
def test_every_shared_case_passes_interpreted(case: Case) -> None:
    assert run(case, mosaic_gpu.default_tuning(case.head_dim)) < 5e-3


@pytest.mark.parametrize(
    ("head_dim", "page", "group", "dtype"),
    [(64, 16, 1, "float16"), (128, 64, 7, "bfloat16"), (128, 128, 4, "bfloat16"), (256, 32, 2, "bfloat16")],
)
def test_the_kernel_lowers_for_cuda(head_dim: int, page: int, group: int, dtype: str) -> None:
    pool = jax.ShapeDtypeStruct((64, 2, page, head_dim), dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,), (3,), (3,))]
    args = (jax.ShapeDtypeStruct((200, 2 * group, head_dim), dtype), pool, pool, *ints)
    kernel = jax.jit(functools.partial(mosaic_gpu.extend_attention, scale=0.1))
    assert kernel.trace(*args).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("tokens", [128, 300, 777])
@pytest.mark.parametrize("rows", [[(0, 1, 1)], [(5, 100, 400), (0, 0, 0), (110, 10, 10)], [(64, 64, 64), (0, 64, 64)], [(0, 0, 0)]])
def test_every_token_is_written_by_one_item(tokens: int, rows: list[tuple[int, int, int]]) -> None:
    starts, lengths, keys = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    items = np.asarray(make_plan(starts, lengths, keys, tokens=tokens, queries=128).items_I6)
    owner = np.full(tokens, -2)
    for at, low, high, row, position, seen in items:
        if high <= low:
            continue
        assert 0 <= at <= low < high <= at + 128 <= tokens
        assert (owner[low:high] == -2).all()
        owner[low:high] = row if seen else -1
        if seen:
            start, length, total = rows[row]
            assert position + (low - at) == total - length + (low - start)
            assert seen == total - length + (high - start)
    wanted = np.full(tokens, -1)
    for row, (start, length, _) in enumerate(rows):
        wanted[start : start + length] = row
    assert (owner == wanted).all()
    assert (np.diff(items[:, 5]) <= 0).all()
