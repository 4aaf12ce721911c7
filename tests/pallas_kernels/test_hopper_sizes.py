"""Sizes of the Hopper attention kernels in plain numbers: what a tile holds, which queries a block
reads, how many blocks a plan may ask for, and what fits a multiprocessor."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.mosaic_gpu import rows_apart
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_decode.mosaic_flash import TILE
from pallas_kernels.paged_decode.mosaic_flash import Spec as DecodeSpec
from pallas_kernels.paged_extend import mosaic_gpu as extend
from pallas_kernels.paged_extend.mosaic_flash import Spec as ExtendSpec
from pallas_kernels.paged_extend.mosaic_kernel import boxes

SHARED_BYTES = 227 << 10  # of one multiprocessor
PROCESSORS = 132
COMMON: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "scale": 0.1,
    "window": None,
    "softcap": None,
    "interpret": None,
}
HEADS = (64, 96, 128, 256)
head_dims = pytest.mark.parametrize("head_dim", HEADS)
# Pages of 8 bits store heads of 96 wider
sized = pytest.mark.parametrize(
    ("head_dim", "itemsize"),
    [(dim, size) for dim in HEADS for size in (1, 2) if (dim, size) != (96, 1)],
)
page_sizes = pytest.mark.parametrize("page", [16, 32, 64, 128])


def decode_spec(
    rows: int = 4, kv_heads: int = 2, group: int = 4, head_dim: int = 128, page: int = 64
) -> DecodeSpec:
    """The parameters of a decode with these shapes."""
    return DecodeSpec(
        B=rows,
        N=kv_heads * group,
        K=kv_heads,
        G=group,
        H=head_dim,
        C=page,
        group=8 if group <= 8 else 16,
        tiles=1,
        tuning=decode.Tuning(),
        **COMMON,
    )


def extend_spec(
    tokens: int, group: int, head_dim: int = 128, page: int = 64, **tuning: int
) -> ExtendSpec:
    """The parameters of an extend with these shapes, heads shared as the back end shares them."""
    sizes = extend.Tuning(**tuning)
    return ExtendSpec(
        T=tokens,
        K=2,
        G=group,
        H=head_dim,
        F=head_dim,
        C=page,
        share=extend.shared_heads(tokens, group, sizes),
        tuning=sizes,
        **COMMON,
    )


@head_dims
def test_columns_of_plain_buffers_cover_a_row_once(head_dim: int) -> None:
    spec = decode_spec(head_dim=head_dim)
    covered = [i for each in spec.columns for i in range(each.start, each.start + each.size)]
    assert covered == list(range(head_dim))
    assert spec.width <= 128 and all(each.size == spec.width for each in spec.columns)


@page_sizes
def test_copies_of_a_tile_bring_exactly_its_tokens(page: int) -> None:
    assert decode_spec(page=page).copies * min(page, TILE) == TILE
    for groups in (1, 2):
        spec = extend_spec(4096, 4, page=page, groups=groups)
        assert spec.copies * min(page, spec.size) == spec.size


@settings(max_examples=100)
@given(rows=st.integers(1, 40), kv_heads=st.integers(1, 8), group=st.integers(1, 16))
def test_a_block_reads_its_queries_within_the_array(rows: int, kv_heads: int, group: int) -> None:
    spec = decode_spec(rows, kv_heads, group)
    end = max(rows * kv_heads * group, spec.group)  # shorter arrays are padded
    for row, head in {(0, 0), (rows - 1, kv_heads - 1), (rows // 2, kv_heads // 2)}:
        first, own = (int(x) for x in spec.first_query(jnp.int32(row), jnp.int32(head)))
        assert 0 <= first and first + spec.group <= end
        assert first + own == (row * kv_heads + head) * group
        assert 0 <= own and own + group <= spec.group


@settings(max_examples=100)
@given(
    tokens=st.integers(1, 9000),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16, 28, 48, 64]),
    groups=st.sampled_from([1, 2]),
)
def test_units_of_an_item_hold_every_head_of_the_group_once(
    tokens: int, group: int, groups: int
) -> None:
    spec = extend_spec(tokens, group, groups=groups)
    assert spec.units * spec.share == group
    assert spec.tokens * spec.share <= ROWS < (spec.tokens + 1) * spec.share
    assert not spec.boxes or (spec.share == 1 and tokens >= spec.size)
    assert spec.size == ROWS * groups


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_three_warpgroups_ask_for_no_more_registers_than_there_are(kv_dtype: str | None) -> None:
    spec = ExtendSpec(
        T=64,
        K=1,
        G=1,
        H=64,
        F=64,
        C=64,
        share=1,
        tuning=extend.Tuning(),
        kv_dtype=kv_dtype,
        **COMMON,
    )
    producer, consumer = spec.registers
    assert producer + 2 * consumer <= 504
    assert producer % 8 == consumer % 8 == 0


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 16, 32, 64, 200])
@pytest.mark.parametrize("cluster", [0, 1, 2, 4, 8, 16])
def test_blocks_of_a_plan_fit_the_card_at_once(kv_heads: int, cluster: int) -> None:
    splits = decode.splits_of(kv_heads, decode.Tuning(cluster=cluster))
    assert splits >= 1
    if splits > 1:  # then owners wait for followers, which must all run
        blocks = splits * kv_heads * max(1, cluster)
        assert blocks <= PROCESSORS
        assert cluster == 0 or splits * kv_heads <= decode.CLUSTERS_AT_ONCE[cluster]


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_more_blocks_never_make_fewer_splits(kv_heads: int) -> None:
    found = [
        decode.splits_of(kv_heads, decode.Tuning(blocks=blocks)) for blocks in range(1, 140, 7)
    ]
    assert found == sorted(found) and found[0] == 1


@sized
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 17, 64, 256, 10**5])
def test_rings_of_tuned_decodes_fit_shared_memory(head_dim: int, itemsize: int, rows: int) -> None:
    for kv_heads in (1, 2, 4, 8):
        tuning = decode.default_tuning(head_dim, itemsize, rows, kv_heads)
        ring = 2 * tuning.stages * TILE * head_dim * itemsize
        query_rows = 16 if itemsize == 1 else 8 if tuning.swapped else ROWS
        queries = tuning.queries * query_rows * head_dim * 2
        outputs = 8 if tuning.swapped or tuning.consumers > 1 else 16
        output = 2 * outputs * (head_dim + 4) * 4 if tuning.cluster else ROWS * head_dim * 2
        # Sums of each warp, which groups of 9 to 16 have from one consumer; parts in flags' ring
        left = 4 * 16 * (head_dim + 4) * 4 if tuning.cluster else 2 * ROWS * head_dim * 2
        warps = left if itemsize == 1 else 0
        assert ring + queries + output + warps <= SHARED_BYTES
        assert tuning.consumers == 1 or (itemsize == 1 and tuning.stages % 2 == 0)
        assert tuning.cluster or not tuning.swapped


@head_dims
@pytest.mark.parametrize("group", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("queries", [1, 2])
def test_keys_for_rows_have_as_many_slots_as_fit_beside_a_group(
    head_dim: int, group: int, queries: int
) -> None:
    wanted = decode.Tuning(stages=12, queries=queries, cluster=1, swapped=True)
    found, padded = decode.fitting(wanted, head_dim, group), 8 if group <= 8 else 16
    slot = 2 * TILE * head_dim * 2
    queries_and_outputs = padded * (queries * head_dim * 2 + 2 * (head_dim + 4) * 4)
    kept = queries_and_outputs + padded * TILE * 2 + 2 * 2 * ROWS * 4 + 1024  # and barriers
    assert found._replace(stages=12) == wanted
    assert found.stages * slot + kept <= SHARED_BYTES
    assert found.stages >= (3 if group <= 8 else 2)
    few = wanted._replace(stages=2)
    assert decode.fitting(few, head_dim, group) == few


@sized
def test_rings_of_tuned_extends_fit_shared_memory(head_dim: int, itemsize: int) -> None:
    tuning = extend.default_tuning(head_dim, itemsize)
    size = ROWS * tuning.groups
    ring = 2 * tuning.stages * size * head_dim * 2
    plain = 3 * size * head_dim * 2  # queries as they come and as operands, and the output
    raw = 0 if itemsize == 2 else 3 * size * (head_dim + 2)
    assert ring + plain + raw <= SHARED_BYTES
    assert tuning.groups in (1, 2) and tuning.blocks <= PROCESSORS


def test_the_ring_of_values_narrower_than_keys_fits_shared_memory() -> None:
    for key, value in extend.UNEQUAL:
        tuning = extend.default_tuning(key)
        size = ROWS * tuning.groups
        assert size * (tuning.stages * (key + value) + 2 * key + value) * 2 <= SHARED_BYTES


TUNED = {
    "head_dim": {"128": {"stages": 3}},
    "head_dim, 8 bits": {"128": {"stages": 6, "consumers": 2}},
    "cases": [
        {"head_dim": 128, "rows": [1, 4], "kv_heads": [2], "sizes": {"cluster": 4}},
        {"head_dim": 128, "rows": [1, 8], "kv_heads": [2, 8], "sizes": {"cluster": 2}},
    ],
    "cases, 8 bits": [
        {"head_dim": 128, "rows": [1, 1], "kv_heads": [2], "sizes": {"cluster": 8}},
    ],
}


@pytest.mark.parametrize(
    ("rows", "kv_heads", "cluster"),
    [(1, 2, 4), (4, 2, 4), (5, 2, 2), (8, 8, 2), (9, 2, 0), (1, 4, 0), (0, 2, 0)],
)
def test_the_first_tuned_case_that_matches_counts(rows: int, kv_heads: int, cluster: int) -> None:
    found = decode.tuning_of(TUNED, 128, 2, rows, kv_heads)
    assert (found.cluster, found.stages) == (cluster, 3)


def test_8_bit_pages_have_cases_of_their_own() -> None:
    narrow = decode.Tuning(stages=6, consumers=2)
    assert decode.tuning_of(TUNED, 128, 1, 1, 2) == narrow._replace(cluster=8)
    assert decode.tuning_of(TUNED, 128, 1, 2, 2) == narrow


def test_a_head_dimension_without_sizes_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="80"):
        decode.tuning_of(TUNED, 80, 2, 1, 2)


@pytest.mark.parametrize("room", ["paged_decode", "paged_extend"])
def test_tuned_files_hold_sizes_that_the_kernels_have(room: str, repo: pathlib.Path) -> None:
    found = json.loads((repo / "pallas_kernels" / room / "tuned" / "nvidia_h200.json").read_text())
    known = set((decode if room == "paged_decode" else extend).Tuning._fields)
    for part in ("head_dim", "head_dim, 8 bits"):
        unequal = {str(key) for key, _ in extend.UNEQUAL} if room == "paged_extend" else set()
        more = {"96"} if part == "head_dim" else set()
        assert set(found[part]) - unequal == {"64", "128", "256"} | more
        assert all(set(sizes) <= known for sizes in found[part].values())
    for cases in ("cases", "cases, 8 bits"):
        assert all(set(case["sizes"]) <= known for case in found.get(cases, []))


@pytest.mark.parametrize("width", [64, 96, 128])
def test_boxes_of_rows_are_all_rows_and_begin_where_a_tensor_copy_may(width: int) -> None:
    apart = rows_apart(width)
    assert apart * width * 2 % 128 == 0 and (apart == 1) == (width != 96)
    for own in range(ROWS):
        for count in range(1, min(ROWS - own, ROWS - 1) + 1):
            found = [
                (begin, size) for there, begin, size in boxes(own, count, even=apart > 1) if there
            ]
            rows = [row for begin, size in found for row in range(begin, begin + size)]
            assert sorted(rows) == list(range(own, own + count))
            assert all(size == 1 or begin % apart == 0 for begin, size in found)
