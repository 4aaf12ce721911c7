"""The Hopper back end of paged decode over 8-bit pages: its lane programs emulated in the
interpreter with race detection, and lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode import mosaic_gpu, reference
from pallas_kernels.paged_decode.cases import CASES, Case, inputs
from pallas_kernels.quantised import SCALE_DTYPE, quantise
from tests.pallas_kernels.places import jitted

SUPPORTED = [c for c in CASES if c.head_dim in (64, 128, 256) and c.page_size in (64, 128)]
QUICK = [
    Case(
        name="sinks, groups of seven",
        lengths=(65, 3, 0, 130),
        heads=7,
        kv_heads=1,
        page_size=64,
        sinks=True,
    )
]
SLOW = [
    *SUPPORTED,
    Case(
        name="heads of 256, groups of 16",
        lengths=(70, 3, 0, 200),
        heads=32,
        head_dim=256,
        page_size=64,
        softcap=20.0,
    ),
    Case(
        name="many splits of one row",
        lengths=(1100,),
        heads=12,
        kv_heads=1,
        head_dim=128,
        page_size=128,
    ),
]
SHARED = [c for c in [*QUICK, *SLOW] if c.heads // c.kv_heads <= 8 and c.head_dim < 256]
SMALL = mosaic_gpu.Tuning(stages=2, blocks=6)
TWO = SMALL._replace(consumers=2)


def clustered(cluster: int, consumers: int) -> mosaic_gpu.Tuning:
    """The sizes of a few small clusters."""
    return SMALL._replace(blocks=12, min_tiles=1, cluster=cluster, consumers=consumers)


def in_8_bits(case: Case, dtype: str) -> tuple[Any, ...]:
    """Pages of keys and of values and their scales; what no row may see is NaN in all three."""
    given = inputs(case)
    narrow = jax.jit(functools.partial(quantise, dtype=dtype))
    (k8, ks), (v8, vs) = narrow(given.pages.k), narrow(given.pages.v)
    hidden = np.isnan(given.pages.k[..., 0])[:, :, None]
    return k8, v8, jnp.where(hidden, jnp.nan, jnp.stack([ks, vs], axis=2)).astype(SCALE_DTYPE)


def error(case: Case, dtype: str, kv_dtype: str, tuning: mosaic_gpu.Tuning = SMALL) -> float:
    """Of the interpreted kernel against the reference over the same pages; queries of dead rows are
    NaN."""
    given = inputs(case)
    k8, v8, scales = in_8_bits(case, kv_dtype)
    q = jnp.asarray(np.where((given.lengths > 0)[:, None, None], given.q, np.nan), dtype)
    rows = jnp.asarray(given.pages.table), jnp.asarray(given.lengths)
    more = {"tuning": tuning, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    out = jitted(mosaic_gpu.decode_attention)(
        q, k8, v8, *rows, scales=scales, **case.options, **more
    )
    wanted = jax.jit(functools.partial(reference.decode_attention, **case.options))(
        q.astype(jnp.float32), k8, v8, *rows, scales=scales
    )
    assert out.dtype == dtype
    return float(np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted))


# What is masked may be NaN
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
# A warp that has seen nothing
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in SHARED],
    ids=lambda c: c.name,
)
@pytest.mark.slow
def test_two_consumers_share_the_tiles(case: Case) -> None:
    assert error(case, "bfloat16", "float8_e4m3fn", TWO) < 5e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=lambda c: c.name)
def test_one_consumer_equals_the_reference_when_interpreted(case: Case) -> None:
    wide = case.page_size == 128
    assert (
        error(case, "float16" if wide else "bfloat16", "float8_e5m2" if wide else "float8_e4m3fn")
        < 5e-3
    )


# What is masked may be NaN, and so may rows of a tile that nobody uses
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "consumers"), [(2, 2), (1, 2), (2, 1)])
def test_what_the_blocks_of_a_cluster_leave_merges_to_the_reference(
    cluster: int, consumers: int
) -> None:
    kv_dtype = "float8_e5m2" if consumers == 1 else "float8_e4m3fn"
    assert error(QUICK[0], "bfloat16", kv_dtype, clustered(cluster, consumers)) < 5e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=lambda c: c.name)
def test_clusters_equal_the_reference_when_interpreted(case: Case, kv_dtype: str) -> None:
    consumers = 2 if case in SHARED else 1
    assert error(case, "bfloat16", kv_dtype, clustered(2, consumers)) < 5e-3


def test_no_copy_overtakes_the_plain_reads_of_the_slot_that_it_fills() -> None:
    three_tiles = Case(
        name="three tiles in two slots", lengths=(190,), heads=1, kv_heads=1, page_size=64
    )
    assert error(three_tiles, "bfloat16", "float8_e4m3fn", TWO._replace(blocks=1)) < 5e-3


LOWERED = [
    (64, 7, "bfloat16", "float8_e4m3fn"),
    (128, 16, "bfloat16", "float8_e5m2"),
    (128, 1, "float16", "float8_e4m3fn"),
]
FAST = [(128, 16, 256), (128, 1, 64)]


@pytest.mark.parametrize(
    ("page", "group", "dtype", "kv", "head_dim"),
    [
        pytest.param(
            *each, head_dim, marks=[] if (*each[:2], head_dim) in FAST else pytest.mark.slow
        )
        for each in LOWERED
        for head_dim in (64, 128, 256)
    ],
)
def test_the_kernel_lowers_for_cuda(
    page: int, group: int, dtype: str, kv: str, head_dim: int
) -> None:
    assert launches(head_dim, page, group, dtype, kv, None) == 1


def test_two_consumers_lower_for_cuda_with_an_even_ring_and_large_groups_have_one() -> None:
    two = mosaic_gpu.Tuning(stages=8, consumers=2)
    for group in (7, 9):
        assert launches(128, 64, group, "bfloat16", "float8_e4m3fn", two) == 1
    with pytest.raises(ValueError, match="two consumers take"):
        launches(128, 64, 7, "bfloat16", "float8_e4m3fn", two._replace(stages=5))


@pytest.mark.parametrize("cluster", [1, 8])
def test_clusters_lower_for_cuda(cluster: int) -> None:
    tuning = mosaic_gpu.Tuning(stages=6, consumers=2, cluster=cluster)
    assert launches(128, 64, 7, "bfloat16", "float8_e4m3fn", tuning) == 1
    with pytest.raises(
        ValueError, match=r"keys for rows take 16-bit pages.*; set swapped to False"
    ):
        launches(128, 64, 7, "bfloat16", "float8_e4m3fn", tuning._replace(swapped=True))


def launches(
    head_dim: int, page: int, group: int, dtype: str, kv: str, tuning: mosaic_gpu.Tuning | None
) -> int:
    """Kernels in the lowered program."""
    pool, scales = (
        jax.ShapeDtypeStruct((64, 2, page, head_dim), kv),
        jax.ShapeDtypeStruct((64, 2, 2, page), SCALE_DTYPE),
    )
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,))]
    args = (jax.ShapeDtypeStruct((3, 2 * group, head_dim), dtype), pool, pool, *ints)
    traced = jitted(mosaic_gpu.decode_attention).trace(
        *args, scales=scales, scale=0.1, window=64, softcap=20.0, tuning=tuning
    )
    return int(traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2"))


@pytest.mark.parametrize(
    ("page", "kinds", "message"),
    [
        (32, ("float8_e4m3fn",) * 2, "8-bit pages of 64 or 128 tokens"),
        (64, ("float8_e4m3fn", "float8_e5m2"), "pages of 8-bit floats, got"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error_that_says_so(
    page: int, kinds: tuple[str, str], message: str
) -> None:
    k, v = (jnp.zeros((3, 2, page, 64), kind) for kind in kinds)
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.check(jnp.zeros((2, 4, 64), jnp.bfloat16), k, v)
