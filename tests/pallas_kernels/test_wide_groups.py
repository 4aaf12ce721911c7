"""Paged decode on Hopper with more than 16 query heads a KV head: how they are cut into tiles, and
that each is computed and stored once."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_decode import mosaic_gpu
from pallas_kernels.paged_decode.cases import Case
from tests.pallas_kernels.test_mosaic_decode import SMALL, run

WIDE = (
    Case(
        name="71 heads in two tiles, sinks",
        lengths=(300, 0, 64, 1),
        heads=71,
        kv_heads=1,
        page_size=64,
        window=200,
        sinks=True,
    ),
    Case(name="groups of 24, sinks", lengths=(300, 0, 1), heads=48, page_size=64, sinks=True),
    Case(name="groups of 64, small pages", lengths=(200, 5), heads=64, kv_heads=1, softcap=3.0),
)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if c is not WIDE[0] else []) for c in WIDE],
    ids=lambda c: c.name,
)
@pytest.mark.slow
def test_groups_wider_than_16_heads_equal_the_reference(case: Case) -> None:
    assert run(case, SMALL._replace(min_tiles=1)) < 5e-3


@pytest.mark.parametrize(
    ("group", "itemsize", "tiles"),
    [
        (1, 2, (1, 1, 8)),
        (16, 2, (1, 16, 16)),
        (17, 2, (1, 17, 32)),
        (48, 2, (1, 48, 64)),
        (64, 2, (1, 64, 64)),
        (71, 2, (2, 36, 64)),
        (128, 2, (2, 64, 64)),
        (16, 1, (1, 16, 16)),
        (24, 1, (2, 12, 16)),
        (71, 1, (5, 15, 16)),
    ],
)
def test_query_heads_are_cut_into_tiles_of_one_size(
    group: int, itemsize: int, tiles: tuple[int, int, int]
) -> None:
    count, heads = mosaic_gpu.tiles_of(2 * group, 2, itemsize)
    assert (count, heads, mosaic_gpu.padded_heads(heads)) == tiles
    tuning = mosaic_gpu.sizes_of(128, itemsize, 1, 4 * group, 4)
    if group <= 16:
        assert tuning == mosaic_gpu.default_tuning(128, itemsize, 1, 4)
    else:
        assert tuning.cluster == 0 and tuning.min_tiles >= tiles[2] // 8


@pytest.mark.parametrize("heads", [71, 150, 128])
def test_each_query_head_is_stored_by_one_block(heads: int) -> None:
    kv_heads = 2 if heads % 2 == 0 else 1
    tiles, group = mosaic_gpu.tiles_of(heads, kv_heads, 2)
    spec = mosaic_gpu.Spec(
        B=3, N=heads, K=kv_heads * tiles, G=group, tiles=tiles, group=64,
        **dict.fromkeys(("H", "C", "scale", "window", "softcap", "tuning", "interpret", "dtype")),
    )  # type: ignore[arg-type]  # fmt: skip
    stored = []
    for h in range(spec.K):
        first = int(spec.first_head(jnp.int32(h)))
        assert int(spec.kv_head(jnp.int32(h))) * heads // kv_heads <= first
        skip = spec.overlap if h % tiles == tiles - 1 else 0
        stored += range(first + skip, first + group)
        for b in range(3):
            at, own = map(int, spec.first_query(jnp.int32(b), jnp.int32(h)))
            assert at + own == b * heads + first and own + group <= spec.group
    assert stored == list(range(heads))


def test_clusters_refuse_wide_groups() -> None:
    case = Case(name="wide", lengths=(3,), heads=40, kv_heads=2, page_size=64)
    with pytest.raises(
        ValueError, match="clusters merge up to 16 query heads a KV head, got 40 over 2; set"
    ):
        run(case, SMALL._replace(cluster=2))


def test_wide_groups_have_no_share_that_is_as_long_as_that_of_a_cluster() -> None:
    for itemsize in (1, 2):
        assert mosaic_gpu.sizes_of(128, itemsize, 1, 4 * 24, 4).min_tiles < 8
