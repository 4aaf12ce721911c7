"""The Hopper back end of paged decode on the CPU: interpreted with race detection, lowered for
CUDA, its split plan checked by counting."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode import mosaic_gpu, reference
from pallas_kernels.paged_decode.cases import CASES, Case, inputs
from pallas_kernels.paged_decode.plan import SPLIT_FIELDS, make_plan
from tests.pallas_kernels.places import jitted

SUPPORTED = [
    c for c in CASES if c.head_dim in (64, 96, 128, 256) and c.page_size in (16, 32, 64, 128)
]
EXTRA = (
    Case(
        name="ragged, heads of 96, sinks, softcap and window",
        lengths=(1, 5, 16, 17, 33, 200),
        head_dim=96,
        softcap=5.0,
        window=20,
        sinks=True,
    ),
    Case(
        name="many splits of one row",
        lengths=(700, 0, 64),
        heads=12,
        kv_heads=1,
        page_size=64,
        head_dim=128,
        window=600,
    ),
)
SMALL = mosaic_gpu.Tuning(stages=2, blocks=6)


def relative_error(out: jax.Array, wanted: jax.Array) -> float:
    """Frobenius norm of the difference over that of `wanted`; NaN stays NaN and fails every
    comparison.
    """
    a, b = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9))


def run(case: Case, tuning: mosaic_gpu.Tuning, dtype: str = "bfloat16") -> float:
    """Error of the interpreted kernel against the reference on the same rounded inputs; queries of
    dead rows are NaN."""
    given = inputs(case)
    q = np.where((given.lengths > 0)[:, None, None], given.q, np.nan)
    low = [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in (q, *given.args[1:])]
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = jitted(mosaic_gpu.decode_attention)(
        *low, **case.options, tuning=tuning, interpret=interpret
    )
    wanted = jax.jit(functools.partial(reference.decode_attention, **case.options))(
        *(a.astype(jnp.float32) if a.dtype == dtype else a for a in low)
    )
    return relative_error(out, wanted)


# Unused rows of a tile hold anything
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [EXTRA[0], pytest.param(EXTRA[1], marks=pytest.mark.slow)],  # splits merge below, too
    ids=lambda c: c.name,
)
def test_the_interpreted_kernel_equals_the_reference(case: Case) -> None:
    many = case.name == "many splits of one row"
    assert (
        run(case, SMALL._replace(blocks=12 if many else 6), "bfloat16" if many else "float16")
        < 5e-3
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("cluster", "swapped"),
    [
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        *(pytest.param(cluster, False, marks=pytest.mark.slow) for cluster in (1, 2)),
    ],  # as above and below
)
def test_what_the_blocks_of_a_cluster_leave_merges_to_the_reference(
    cluster: int, swapped: bool
) -> None:
    name = "dead rows between live ones" if cluster == 1 else "sinks, groups of seven, pages of 64"
    case = next(c for c in CASES if c.name == name)
    assert run(case, SMALL._replace(blocks=12, cluster=cluster, swapped=swapped)) < 5e-3


def test_a_number_of_rows_and_heads_may_have_sizes_of_its_own() -> None:
    common = {"stages": 3, "queries": 2, "blocks": 132, "min_tiles": 2}
    few = {
        "head_dim": 128,
        "rows": [1, 8],
        "kv_heads": [2, 4],
        "sizes": {"cluster": 8, "min_tiles": 32},
    }
    tuned = {"head_dim": {"64": common, "128": common}, "cases": [few]}
    wanted = mosaic_gpu.Tuning(**common)._replace(cluster=8, min_tiles=32)
    assert [mosaic_gpu.tuning_of(tuned, 128, 2, rows, 4) == wanted for rows in (0, 1, 8, 9)] == [
        False,
        True,
        True,
        False,
    ]
    assert [mosaic_gpu.tuning_of(tuned, 128, 2, 1, heads) == wanted for heads in (1, 2, 8)] == [
        False,
        True,
        False,
    ]
    assert mosaic_gpu.tuning_of(tuned, 64, 2, 1, 4) == mosaic_gpu.Tuning(**common)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.slow
def test_plan_and_kernel_take_the_same_sizes_of_a_case(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in CASES if c.name == "dead rows between live ones")
    common = {"stages": 2, "queries": 2, "blocks": 12, "min_tiles": 1}
    own = {
        "head_dim": case.head_dim,
        "rows": [1, 64],
        "kv_heads": [case.kv_heads],
        "sizes": {"cluster": 2},
    }
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"head_dim": {str(case.head_dim): common}, "cases": [own]}))
    monkeypatch.setattr(mosaic_gpu, "TUNED", file)
    mosaic_gpu.default_tuning.cache_clear()
    try:
        given = inputs(case)
        low = [jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else None) for a in given.args]
        sizes = {
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "window": case.options.get("window"),
        }
        plan = mosaic_gpu.plan(low[4], **sizes)
        # A flag a head and a block of the cluster
        assert plan.splits_SF.shape[1] == SPLIT_FIELDS + 2 * case.kv_heads
        out = mosaic_gpu.decode_attention(
            *low, **case.options, plan=plan, interpret=plgpu.InterpretGPUParams()
        )
        wanted = jax.jit(functools.partial(reference.decode_attention, **case.options))(
            *(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in low)
        )
        assert relative_error(out, wanted) < 5e-3
    finally:
        mosaic_gpu.default_tuning.cache_clear()


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("cluster", mosaic_gpu.CLUSTERS_AT_ONCE)
def test_clusters_that_wait_for_each_other_are_on_the_chip_together(
    cluster: int, kv_heads: int
) -> None:
    splits = mosaic_gpu.splits_of(kv_heads, mosaic_gpu.Tuning(cluster=cluster))
    assert splits == 1 or splits * kv_heads <= mosaic_gpu.CLUSTERS_AT_ONCE[cluster]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.name)
def test_every_shared_case_passes_interpreted(case: Case) -> None:
    assert run(case, SMALL) < 5e-3


LOWERED = [
    (16, 1, "float16"),
    (32, 5, "bfloat16"),
    (64, 7, "bfloat16"),
    (128, 16, "bfloat16"),
    (64, 71, "bfloat16"),
]
FAST = [(16, 1, 64), (16, 1, 96), (32, 5, 256), (64, 71, 128)]


@pytest.mark.parametrize(
    ("page", "group", "dtype", "head_dim"),
    [
        pytest.param(
            *each, head_dim, marks=[] if (*each[:2], head_dim) in FAST else pytest.mark.slow
        )
        for each in LOWERED
        for head_dim in (64, 96, 128, 256)
    ],
)
def test_the_kernel_lowers_for_cuda(page: int, group: int, dtype: str, head_dim: int) -> None:
    pool = jax.ShapeDtypeStruct((64, 2, page, head_dim), dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,))]
    args = (jax.ShapeDtypeStruct((3, 2 * group, head_dim), dtype), pool, pool, *ints)
    lowered = (
        jitted(mosaic_gpu.decode_attention)
        .trace(*args, scale=0.1, window=64, softcap=20.0)
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("head_dim", "swapped"),
    [pytest.param(96, False, marks=pytest.mark.slow), (96, True), (128, False), (128, True)],
)
@pytest.mark.parametrize("cluster", [1, 8])
def test_clusters_lower_for_cuda(cluster: int, head_dim: int, swapped: bool) -> None:
    pool = jax.ShapeDtypeStruct((64, 2, 64, head_dim), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,))]
    args = (jax.ShapeDtypeStruct((3, 14, head_dim), jnp.bfloat16), pool, pool, *ints)
    tuning = mosaic_gpu.Tuning(cluster=cluster, swapped=swapped)
    lowered = (
        jitted(mosaic_gpu.decode_attention)
        .trace(*args, scale=0.1, window=64, softcap=20.0, tuning=tuning)
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("min_tiles", [1, 3])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (0, 700, 0, 5, 64, 65), (2048,) * 9, (0, 0), (1, 1, 1, 9000), (640,) * 7, (0, 3, 0)],
)
def test_every_tile_belongs_to_one_split_and_every_follower_has_one_owner(
    lengths: tuple[int, ...], min_tiles: int, window: int | None
) -> None:
    splits, tile = 7, 64
    made = make_plan(
        jnp.asarray(lengths), tile=tile, splits=splits, min_tiles=min_tiles, window=window, flags=2
    )
    plan = jax.tree.map(np.asarray, made)
    seen: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
    waited: dict[tuple[int, int], int] = {}  # (owner, row): followers it waits for
    raised: dict[tuple[int, int], list[int]] = {}
    shares = []
    for split, (low, high, r0, r1, *first_row, owner, followers, flag, other_flag) in enumerate(
        plan.splits_SF
    ):
        shares.append(high - low)
        assert (flag, other_flag) == (0, 0)
        assert (r1 > r0) == (high > low)
        assert r1 == r0 or first_row == list(plan.rows_B4[r0])
        for row in range(r0, r1):
            begin, end, length, zero = plan.rows_B4[row]
            assert length == lengths[row]
            seen[row].extend(range(max(low, begin) - zero, min(high, end) - zero))
            if end > begin and begin < low:
                assert row == r0
                raised.setdefault((owner, row), []).append(split)
            if begin >= low and end > high:
                assert row == r1 - 1
                waited[split, row] = followers
        assert followers == 0 or (split, r1 - 1) in waited
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window) // tile
        assert seen[row] == list(range(first, -(-length // tile)))
    assert {key: len(splits) for key, splits in raised.items()} == waited
    for (owner, _), found in raised.items():
        assert found == list(range(owner + 1, owner + 1 + len(found)))
    busy = [share for share in shares if share]
    assert not busy or max(busy) - min(busy) <= 1


LENGTHS = [
    (1,),
    (0, 700, 0, 5, 64, 65),
    (2048,) * 9,
    (0, 0),
    (1, 1, 1, 9000),
    (640,) * 7,
    (0, 3, 0),
    (64,) * 40,
]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_plan_without_splits_cuts_no_row(lengths: tuple[int, ...], window: int | None) -> None:
    splits, tile = 7, 64
    made = make_plan(
        jnp.asarray(lengths),
        tile=tile,
        splits=splits,
        min_tiles=2,
        window=window,
        flags=2,
        no_split=True,
    )
    plan = jax.tree.map(np.asarray, made)
    work = [
        (split, *map(int, fields))
        for split, fields in enumerate(plan.splits_SF)
        if fields[1] > fields[0]
    ]
    assert all(
        owner == split and followers == 0
        for split, _, _, _, _, _, _, _, _, owner, followers, *_ in work
    )
    bounds = [0, *(high for _, _, high, *_ in work)]
    assert [low for _, low, *_ in work] == bounds[:-1], "shares follow one another"
    live = plan.rows_B4[plan.rows_B4[:, 1] > plan.rows_B4[:, 0]]
    assert bounds[-1] == (live[-1, 1] if len(live) else 0)
    assert set(bounds) <= {0, *live[:, 1]}
    for _, low, high, first, end, *first_row in (
        (w[0], w[1], w[2], w[3], w[4], *w[5:9]) for w in work
    ):
        assert (
            first_row == list(plan.rows_B4[first])
            and plan.rows_B4[first][0] == low
            and plan.rows_B4[end - 1][1] == high
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "sizes", [pytest.param({}, marks=pytest.mark.slow), {"cluster": 1, "swapped": True}]
)
def test_a_row_that_is_not_split_gets_the_same_bits_in_any_batch(sizes: dict[str, Any]) -> None:
    given = inputs(
        Case(
            name="not split",
            lengths=(300, 64, 1, 450),
            heads=4,
            kv_heads=2,
            page_size=64,
            head_dim=64,
        )
    )
    low = [jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else None) for a in given.args]
    tuning = SMALL._replace(blocks=6, **sizes)

    def out(lengths: np.ndarray) -> np.ndarray:
        return np.asarray(
            jitted(mosaic_gpu.decode_attention)(
                *low[:4],
                lengths,
                scale=0.1,
                no_split=True,
                tuning=tuning,
                interpret=plgpu.InterpretGPUParams(),
            )
        )

    crowd = out(given.lengths)
    for row in range(len(given.lengths)):
        alone = out(
            np.where(np.arange(len(given.lengths)) == row, given.lengths, 0).astype(np.int32)
        )
        assert (alone[row] == crowd[row]).all()


def test_clusters_split_rows_and_refuse_not_to() -> None:
    with pytest.raises(ValueError, match="take a cluster of 1"):
        mosaic_gpu.plan(
            jnp.ones((3,), jnp.int32),
            heads=8,
            kv_heads=2,
            head_dim=128,
            no_split=True,
            tuning=mosaic_gpu.Tuning(cluster=2),
        )


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        (((2, 4, 64), "float32"), ((3, 2, 16, 64), "float32"), "bfloat16 or float16"),
        (((2, 4, 80), "bfloat16"), ((3, 2, 16, 80), "bfloat16"), "head_dim 64, 96, 128 or 256"),
        (((2, 4, 64), "bfloat16"), ((3, 2, 24, 64), "bfloat16"), "pages of 16, 32, 64 or 128"),
        (((2, 5, 64), "bfloat16"), ((3, 2, 16, 64), "bfloat16"), "a whole number of query heads"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error_that_says_so(
    q: tuple, pool: tuple, message: str
) -> None:  # type: ignore[type-arg]
    pages = jnp.zeros(*pool)
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.decode_attention(
            jnp.zeros(*q),
            pages,
            pages,
            jnp.zeros((2, 1), jnp.int32),
            jnp.zeros((2,), jnp.int32),
            scale=1.0,
        )
