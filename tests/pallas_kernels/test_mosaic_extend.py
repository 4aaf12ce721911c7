"""The Hopper back end of paged extend on the CPU: interpreted with race detection, lowered for
CUDA, its work list checked by counting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_extend import mosaic_gpu, reference
from pallas_kernels.paged_extend.cases import CASES, Case, inputs
from pallas_kernels.paged_extend.plan import Cut, make_plan

SUPPORTED = [
    c for c in CASES if c.head_dim in (64, 96, 128, 256) and c.page_size in (16, 32, 64, 128)
]
ONE = mosaic_gpu.Tuning(groups=1, blocks=8, min_tiles=1)
TWO = mosaic_gpu.Tuning(blocks=8, min_tiles=1)
APART = 0  # heads never share a tile
# What costs is compiling each
FAST = (
    "ragged, sinks, groups of seven, heads of 96, many parts, tokens of no row",
    "a prefix, window and softcap",
)
CHOSEN = (
    (
        Case(
            name="ragged, sinks, groups of seven, heads of 96, many parts, tokens of no row",
            rows=((0, 12), (270, 5), (9, 2)),
            gap=3,
            heads=7,
            kv_heads=1,
            head_dim=96,
            page_size=32,
            sinks=True,
        ),
        ONE,
    ),
    (
        Case(
            name="ragged, with tokens of no row",
            rows=((0, 70), (64, 1), (9, 66)),
            gap=3,
            heads=2,
            kv_heads=1,
        ),
        ONE,
    ),
    (
        Case(name="heads apart", rows=((0, 70), (64, 1), (9, 66)), gap=3, heads=2, kv_heads=1),
        TWO._replace(shared_up_to=APART),
    ),
    (
        Case(
            name="a prefix, window and softcap",
            rows=((100, 140), (0, 0)),
            heads=1,
            kv_heads=1,
            page_size=64,
            head_dim=128,
            window=100,
            softcap=5.0,
        ),
        TWO,
    ),
    (
        Case(
            name="pages of 128, head_dim 128",
            rows=((130, 65),),
            heads=3,
            kv_heads=1,
            page_size=128,
            head_dim=128,
        ),
        ONE,
    ),
    (
        Case(
            name="many parts, sinks",
            rows=((700, 5),),
            heads=7,
            kv_heads=1,
            page_size=32,
            sinks=True,
        ),
        ONE,
    ),
    (
        Case(
            name="keys of 192, values of 128",
            rows=((60, 140), (0, 3)),
            heads=1,
            kv_heads=1,
            page_size=64,
            head_dim=192,
            value_dim=128,
        ),
        TWO._replace(stages=1),
    ),
    (
        Case(
            name="sinks, heads apart",
            rows=((200, 66),),
            heads=2,
            kv_heads=1,
            page_size=32,
            sinks=True,
        ),
        ONE._replace(shared_up_to=APART),
    ),
)


def run(case: Case, tuning: mosaic_gpu.Tuning) -> float:
    """Error of the interpreted kernel against the reference on the same rounded inputs."""
    low = [jnp.asarray(a, "bfloat16" if a.dtype == np.float32 else None) for a in inputs(case).args]
    kernel = functools.partial(
        mosaic_gpu.extend_attention,
        tuning=tuning,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    out = jax.jit(functools.partial(kernel, **case.options))(*low)
    wanted = reference.extend_attention(
        *(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in low), **case.options
    )
    a, b = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9))


# Queries of no row hold anything
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        pytest.param(*each, id=each[0].name, marks=[] if each[0].name in FAST else pytest.mark.slow)
        for each in CHOSEN
    ],
)
def test_the_interpreted_kernel_equals_the_reference(case: Case, tuning: mosaic_gpu.Tuning) -> None:
    assert run(case, tuning) < 5e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", SUPPORTED, ids=lambda c: c.name)
def test_every_shared_case_passes_interpreted(case: Case) -> None:
    assert run(case, mosaic_gpu.default_tuning(case.head_dim)._replace(blocks=6)) < 5e-3


@pytest.mark.parametrize(
    ("tokens", "head_dim", "page", "group", "dtype", "sinks"),
    [
        (200, 64, 16, 1, "float16", False),
        (600, 128, 128, 4, "bfloat16", True),
        (200, 256, 32, 2, "bfloat16", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (2048, 96, 64, 1, "bfloat16", False),
                (2048, 128, 64, 7, "bfloat16", False),
                (128, 128, 64, 7, "bfloat16", True),
                (1, 128, 16, 40, "bfloat16", False),
            )
        ),
    ],
)
def test_the_kernel_lowers_for_cuda(
    tokens: int, head_dim: int, page: int, group: int, dtype: str, sinks: bool
) -> None:
    pool = jax.ShapeDtypeStruct((64, 2, page, head_dim), dtype)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,), (3,), (3,))]
    args = (jax.ShapeDtypeStruct((tokens, 2 * group, head_dim), dtype), pool, pool, *ints)
    given = {"sinks": jax.ShapeDtypeStruct((2 * group,), jnp.float32)} if sinks else {}
    kernel = jax.jit(functools.partial(mosaic_gpu.extend_attention, scale=0.1))
    assert (
        kernel.trace(*args, **given)
        .lower(lowering_platforms=("cuda",))
        .as_text()
        .count("mosaic_gpu_v2")
        == 1
    )


NOT_IN_USE = (0, 0, 0)
# Most have three, so that few programs are compiled
ROWS = [
    [(0, 1, 1)],
    [(5, 100, 400), NOT_IN_USE, (110, 10, 10)],
    [(64, 64, 64), (0, 64, 64), NOT_IN_USE],
    [NOT_IN_USE],
    [(0, 120, 5000), (122, 6, 6), NOT_IN_USE],
]


@pytest.mark.parametrize(
    ("tokens", "units", "window"), [(128, 1, None), (300, 7, None), (777, 2, 100)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_every_tile_of_every_token_is_worked_on_once(
    tokens: int, units: int, window: int | None, rows: list[tuple[int, int, int]]
) -> None:
    starts, lengths, keys = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    cut = Cut(tokens=tokens, queries=36, keys=64, units=units, splits=13, min_tiles=2, kv_heads=3)
    plan = make_plan(starts, lengths, keys, cut=cut, window=window)
    items, splits = (np.asarray(a) for a in plan)
    owner, line = np.full(tokens, -2), []
    for i, (at, low, high, row, position, seen, first, begin) in enumerate(items):
        if high <= low:
            continue
        assert 0 <= at <= low < high <= at + 36 <= tokens
        assert (owner[low:high] == -2).all()
        owner[low:high] = row if seen else -1
        assert begin == len(line)
        end = -(-seen // 64)
        if seen:
            start, length, total = rows[row]
            assert position + (low - at) == total - length + (low - start)
            assert seen == total - length + (high - start)
            oldest = 0 if window is None else max(position + low - at - window + 1, 0)
            assert first * 64 <= oldest < first * 64 + 64
        line += [i * units + unit for unit in range(units) for _ in range(max(end - first, 1))]
    wanted = np.full(tokens, -1)
    for row, (start, length, _) in enumerate(rows):
        wanted[start : start + length] = row
    assert (owner == wanted).all()
    assert_splits_share_the_line(np.array(line), items, splits, units)


@pytest.mark.parametrize(
    ("tokens", "units", "window"), [(128, 1, None), (300, 7, None), (777, 2, 100)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_a_plan_without_splits_cuts_no_unit(
    tokens: int, units: int, window: int | None, rows: list[tuple[int, int, int]]
) -> None:
    starts, lengths, keys = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    cut = Cut(tokens=tokens, queries=36, keys=64, units=units, splits=13, min_tiles=2, kv_heads=3)
    items, divided = (
        np.asarray(a) for a in make_plan(starts, lengths, keys, cut=cut, window=window)
    )
    same, splits = (
        np.asarray(a)
        for a in make_plan(starts, lengths, keys, cut=cut._replace(no_split=True), window=window)
    )
    assert (items == same).all()
    work = [
        (number, *map(int, split)) for number, split in enumerate(splits) if split[1] > split[0]
    ]
    bounds = [0, *(high for _, _, high, *_ in work)]
    assert [low for _, low, *_ in work] == bounds[:-1] and bounds[-1] == divided[:, 1].max()
    ends = {0}
    for _, low, high, _, _, seen, first, begin in items:
        if high > low:
            ends |= {
                int(begin) + (unit + 1) * max(-(-int(seen) // 64) - int(first), 1)
                for unit in range(units)
            }
    assert set(bounds) <= ends
    for number, _, _, first, end, home, followers, *fields in work:
        assert end > first and home == number and followers == 0
        assert fields[:8] == list(items[first // units])


def assert_splits_share_the_line(
    line: np.ndarray, items: np.ndarray, splits: np.ndarray, units: int
) -> None:
    """Shares follow one another and differ by a tile at most; units, owners and followers are those
    of the line."""
    live = [split for split in splits if split[1] > split[0]]
    assert live[0][0] == 0 and live[-1][1] == len(line)
    assert (
        max(split[1] - split[0] for split in live) <= min(split[1] - split[0] for split in live) + 1
    )
    split_of = np.repeat(np.arange(len(live)), [split[1] - split[0] for split in live])
    for number, (low, high, first, end, home, followers, *rest) in enumerate(live):
        assert (first, end) == (line[low], line[high - 1] + 1)
        assert home == split_of[np.flatnonzero(line == line[low])[0]]
        last = split_of[line == line[high - 1]]
        assert followers == (last[-1] - number if last[0] == number else 0)
        assert (rest[:8] == items[first // units]).all() and not any(rest[8:])
    assert all(split[2] == split[3] for split in splits[len(live) :])
