"""The Hopper back end of paged extend over 8-bit pages: its lane program emulated in the
interpreter with race detection, and lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lanes import Emulated, plain
from pallas_kernels.paged_extend import mosaic_gpu, reference
from pallas_kernels.paged_extend.cases import CASES, Case, inputs
from pallas_kernels.paged_extend.mosaic_flash import Spec
from pallas_kernels.paged_extend.mosaic_narrow import widen
from pallas_kernels.quantised import SCALE_DTYPE, quantise

TWO = mosaic_gpu.Tuning(blocks=8, min_tiles=1, stages=1)
ONE = TWO._replace(groups=1, stages=2)
PARTED = (
    (
        Case(
            name="two pages a tile",
            rows=((100, 60), (0, 0), (9, 3)),
            gap=3,
            heads=2,
            kv_heads=1,
            page_size=64,
        ),
        TWO,
    ),
    (
        Case(
            name="half a page a tile, parts",
            rows=((200, 5),),
            heads=3,
            kv_heads=1,
            page_size=128,
            head_dim=128,
        ),
        ONE,
    ),
)
SHARED = [c for c in CASES if c.head_dim in (64, 128, 256) and c.page_size in (64, 128)] + [
    Case(
        name="head_dim 256",
        rows=((130, 70), (0, 3)),
        heads=4,
        kv_heads=2,
        page_size=64,
        head_dim=256,
    )
]


def spec_of(**sizes: Any) -> Spec:
    """A kernel over 8-bit pages: these sizes, and small ones for the others."""
    common: dict[str, Any] = dict.fromkeys(("window", "softcap", "interpret"))
    common |= {
        "T": 128,
        "K": 1,
        "G": 1,
        "H": 128,
        "F": 128,
        "C": 64,
        "share": 1,
        "dtype": jnp.bfloat16,
    }
    return Spec(**common | {"scale": 0.1} | sizes)


def run(case: Case, tuning: mosaic_gpu.Tuning, kv_dtype: str) -> float:
    """Error of the interpreted kernel against the reference over the same pages; what no row may
    see is NaN."""
    q, k, v, *rows = inputs(case).args
    rows = [jnp.asarray(x) for x in rows]
    (k8, ks), (v8, vs) = (quantise(jnp.asarray(x), kv_dtype) for x in (k, v))
    scales = jnp.where(
        np.isnan(k[..., 0])[:, :, None], jnp.nan, jnp.stack([ks, vs], axis=2)
    ).astype(SCALE_DTYPE)
    low = jnp.asarray(q, jnp.bfloat16)
    kernel = functools.partial(
        mosaic_gpu.extend_attention,
        tuning=tuning,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    out = jax.jit(functools.partial(kernel, **case.options))(low, k8, v8, *rows, scales=scales)
    wanted = reference.extend_attention(
        low.astype(jnp.float32), k8, v8, *rows, scales=scales, **case.options
    )
    return float(
        np.linalg.norm(np.asarray(out, np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-9)
    )


@pytest.mark.slow
# Queries of no row hold anything
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("case", "tuning"), PARTED, ids=lambda value: getattr(value, "name", ""))
def test_the_interpreted_kernel_equals_the_reference(case: Case, tuning: mosaic_gpu.Tuning) -> None:
    assert run(case, tuning, "float8_e4m3fn") < 5e-3


@pytest.mark.parametrize(
    ("head_dim", "groups", "dtype"),
    [
        (64, 1, "bfloat16"),
        (64, 2, "bfloat16"),
        (128, 1, "float16"),
        (128, 2, "float16"),
        (256, 1, "bfloat16"),
    ],
)
def test_widened_tiles_are_what_8_bits_stand_for_and_zeros_where_nothing_is_seen(
    head_dim: int, groups: int, dtype: str
) -> None:
    spec = spec_of(
        T=200,
        K=2,
        G=4,
        H=head_dim,
        dtype=jnp.dtype(dtype),
        tuning=ONE._replace(groups=groups),
        kv_dtype="float8_e4m3fn",
    )
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.standard_normal((spec.size, head_dim)), jnp.float8_e4m3fn)
    scales = jnp.asarray(2.0 ** rng.integers(-9, 9, spec.size), SCALE_DTYPE)
    count = spec.size - 13
    m = Emulated()
    widen(
        m,
        spec,
        (
            plain(source.at[count:].set(jnp.nan), head_dim),
            plain(scales.at[count:].set(jnp.nan)[None], spec.size),
            plain(None, 2 * head_dim),
        ),
        count,
    )
    wanted = (source.astype(jnp.float32) * scales.astype(jnp.float32)[:, None]).at[count:].set(0)
    np.testing.assert_array_equal(m.written(source.shape), wanted)
    # A store outside the tile is dropped above; on a card it hits other tiles
    at = np.concatenate([row * head_dim + column for row, column, _ in m.stored])
    np.testing.assert_array_equal(np.sort(at), np.arange(0, spec.size * head_dim, 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_more_cases_pass_interpreted(case: Case) -> None:
    assert (
        run(case, mosaic_gpu.default_tuning(case.head_dim, 1)._replace(blocks=6), "float8_e5m2")
        < 5e-3
    )


@pytest.mark.parametrize(
    ("tokens", "head_dim", "page", "group", "kv"),
    [
        (200, 64, 64, 1, "float8_e4m3fn"),
        (2048, 128, 64, 7, "float8_e4m3fn"),
        (128, 128, 128, 7, "float8_e5m2"),
        (200, 256, 128, 2, "float8_e4m3fn"),
    ],
)
def test_the_kernel_lowers_for_cuda(
    tokens: int, head_dim: int, page: int, group: int, kv: str
) -> None:
    pool, scales = (
        jax.ShapeDtypeStruct((64, 2, page, head_dim), kv),
        jax.ShapeDtypeStruct((64, 2, 2, page), SCALE_DTYPE),
    )
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,), (3,), (3,))]
    args = (jax.ShapeDtypeStruct((tokens, 2 * group, head_dim), jnp.bfloat16), pool, pool, *ints)
    kernel = jax.jit(functools.partial(mosaic_gpu.extend_attention, scale=0.1))
    assert (
        kernel.trace(*args, scales=scales)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        .count("mosaic_gpu_v2")
        == 1
    )


def test_plans_are_the_same_for_both_types() -> None:
    for head_dim in (64, 128, 256):
        wide, narrow = (
            mosaic_gpu.default_tuning(head_dim, size)._replace(stages=0) for size in (2, 1)
        )
        assert wide == narrow


def test_small_pages_are_refused() -> None:
    pages = jnp.zeros((3, 2, 32, 64), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="8-bit pages of 64 or 128 tokens"):
        mosaic_gpu.check(jnp.zeros((2, 4, 64), jnp.bfloat16), pages, pages)


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_no_warpgroup_waits_for_registers_that_none_gives_back(kv_dtype: str | None) -> None:
    spec = spec_of(tuning=TWO, kv_dtype=kv_dtype)
    producer, consumer = spec.registers
    each = 65536 // (3 * 128) // 8 * 8  # what a thread of three warpgroups starts with
    assert producer % 8 == consumer % 8 == 0
    assert producer <= each <= consumer
    assert producer + TWO.groups * consumer <= 3 * each
