"""What the attention kernels refuse, with the reason and the limit, and how they cut tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_gpu, mosaic_tpu, xla
from pallas_kernels.items import Items
from pallas_kernels.paged_extend import mosaic_gpu as extend


def shapes(
    q: str = "bfloat16",
    k: str | None = None,
    v: str | None = None,
    heads: tuple[int, int] = (8, 2),
    head_dim: tuple[int, int] = (128, 128),
    page: int = 64,
    v_pages: int = 10,
) -> tuple[Any, Any, Any]:
    """Queries, pages of keys and pages of values of one call."""
    k, v = k or q, v or k or q
    queries = jax.ShapeDtypeStruct((3, heads[0], head_dim[0]), jnp.dtype(q))
    pool = jax.ShapeDtypeStruct((10, heads[1], page, head_dim[1]), jnp.dtype(k))
    values = jax.ShapeDtypeStruct((v_pages, heads[1], page, head_dim[1]), jnp.dtype(v))
    return queries, pool, values


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hopper_takes_pages_of_its_sizes(dtype: str, head_dim: int, page: int) -> None:
    mosaic_gpu.check_pages("decode", *shapes(dtype, head_dim=(head_dim, head_dim), page=page))


@pytest.mark.parametrize("pages", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [64, 128])
def test_hopper_takes_pages_of_8_bits(pages: str, size: int) -> None:
    mosaic_gpu.check_pages("decode", *shapes("bfloat16", pages, page=size))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": "float32"}, "bfloat16 or float16 throughout.*got q float32, k float32, v float32"),
        ({"k": "float16"}, "got q bfloat16, k float16, v float16"),
        ({"k": "float8_e4m3fn", "v": "bfloat16"}, "k float8_e4m3fn, v bfloat16"),
        ({"k": "float8_e4m3fn", "page": 32}, "8-bit pages of 64 or 128 tokens, got 32"),
        ({"head_dim": (80, 80)}, r"head_dim 64, 96, 128 or 256.*got q \(3, 8, 80\)"),
        (
            {"k": "float8_e5m2", "head_dim": (96, 96)},
            r"head_dim 64, 128 or 256.*got q \(3, 8, 96\)",
        ),
        ({"head_dim": (128, 64)}, "head_dim 64, 96, 128 or 256"),
        ({"v_pages": 11}, "equal K and V pools"),
        ({"page": 256}, "pages of 16, 32, 64 or 128 tokens, got 256"),
        ({"page": 24}, "pages of 16, 32, 64 or 128 tokens, got 24"),
    ],
)
def test_hopper_refuses_other_pages_in_the_ops_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"mosaic_gpu decode takes .*{message}"):
        mosaic_gpu.check_pages("decode", *shapes(**given))


def test_hopper_extends_over_keys_of_192_and_values_of_128() -> None:
    q, keys, _ = shapes(head_dim=(192, 192))
    values = shapes()[2]
    extend.check(q, keys, values)
    for others in ((keys, keys), (values, keys), (values, values)):
        with pytest.raises(ValueError, match="mosaic_gpu extend takes head_dim 64, 96, 128 or 256"):
            extend.check(q, *others)
    with pytest.raises(ValueError, match="mosaic_gpu decode takes"):
        mosaic_gpu.check_pages("decode", q, keys, values)
    eight = shapes(k="float8_e4m3fn", head_dim=(192, 192))[1]
    with pytest.raises(ValueError, match="equal K and V pools"):
        extend.check(q, eight, shapes(k="float8_e4m3fn")[2])


@pytest.mark.parametrize(
    ("widths", "stored"),
    [
        ((96, 64), (96, 96)),
        ((128, 64), (128, 128)),
        ((192, 128), (192, 128)),
        ((160, 96), (192, 128)),
        ((192, 192), (256, 256)),
        ((40, 64), (64, 64)),
    ],
)
def test_heads_are_stored_as_the_narrowest_that_hopper_extends(
    widths: tuple[int, int], stored: tuple[int, int]
) -> None:
    assert extend.stored(*widths) == stored


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tpu_takes_wide_heads_and_whole_registers_of_tokens(dtype: str) -> None:
    mosaic_tpu.check(*shapes(dtype, page=mosaic_tpu.sublanes(dtype)))
    mosaic_tpu.check(*shapes(dtype, head_dim=(256, 256), page=64))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": "float16"}, "bfloat16 or float32 throughout, got q float16"),
        ({"k": "float32"}, "got q bfloat16, k float32, v float32"),
        ({"k": "float8_e4m3fn"}, "bfloat16 or float32 throughout"),
        ({"head_dim": (64, 64)}, r"multiple of 128, and equal K and V pools, got q \(3, 8, 64\)"),
        ({"v_pages": 11}, "equal K and V pools"),
        ({"page": 8}, "pages of a multiple of 16 tokens in bfloat16, got 8"),
        ({"q": "float32", "page": 12}, "pages of a multiple of 8 tokens in float32, got 12"),
        ({"heads": (9, 2)}, "whole number of query heads a KV head, got 9 over 2"),
    ],
)
def test_a_tpu_refuses_other_pages(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"mosaic_tpu takes .*{message}"):
        mosaic_tpu.check(*shapes(**given))


def test_a_tpu_refuses_a_table_beyond_its_scalar_memory() -> None:
    q, pool, values = (jnp.zeros(x.shape, x.dtype) for x in shapes("float32"))
    width = mosaic_tpu.TABLE_BYTES // 4 + 1
    spec = mosaic_tpu.Spec(queries=1, scale=1.0, heads=1, pages=2, interpret=False)
    items = Items(*(jnp.zeros(1, jnp.int32) for _ in range(3)))
    table = jax.ShapeDtypeStruct((1, width), jnp.int32)
    with pytest.raises(ValueError, match=f"takes at most 65536 pages a request, got {width}"):
        mosaic_tpu.attend(spec, q[:1, None], pool, values, table, items, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "width"), [(1, 70_000), (5, 10), (7, 20_000), (300, 1_000)])
def test_rows_are_grouped_so_that_each_groups_tables_fit(rows: int, width: int) -> None:
    table = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    groups = mosaic_tpu.row_groups(table)  # type: ignore[arg-type]
    covered = [row for group in groups for row in range(rows)[group]]
    assert covered == list(range(rows))
    limit = max(mosaic_tpu.TABLE_BYTES, 4 * width)
    assert max(4 * width * len(range(rows)[group]) for group in groups) <= limit


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("page", "max_tokens"), [(16, 512), (64, 4096), (128, 100)])
def test_a_tpus_tile_fits_its_buffers_and_has_at_least_one_page(
    heads: int, page: int, max_tokens: int
) -> None:
    pool = shapes(heads=(8, 8), page=page)[1]
    pages = mosaic_tpu.pages_per_tile(pool, heads, max_tokens)
    assert pages >= 1
    if pages > 1:
        assert pages * page <= max_tokens
        assert 4 * pages * page * heads * 128 * 2 <= mosaic_tpu.BUFFER_BYTES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": (9, 2)}, r"got q \(3, 9, 128\), k \(10, 2, 64, 128\)"),
        ({"head_dim": (128, 64)}, "whose heads divide the query heads"),
        ({"v_pages": 11}, "K and V pools of equal pages"),
    ],
)
def test_the_fallback_refuses_pools_that_do_not_fit_the_queries(
    given: dict[str, Any], message: str
) -> None:
    xla.check(*shapes("float32", head_dim=(24, 24), page=7))
    with pytest.raises(ValueError, match=message):
        xla.check(*shapes(**given))


def test_the_fallbacks_tiles_shrink_as_items_grow() -> None:
    pool = shapes("float32")[1]
    sizes = [
        xla.pages_per_tile(jax.ShapeDtypeStruct((items, 2, 8, 128), jnp.float32), pool)  # type: ignore[arg-type]
        for items in (1, 64, 256, 4096)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] * 64 == xla.MAX_TILE_TOKENS and sizes[-1] * 64 == xla.MIN_TILE_TOKENS


def test_a_missing_first_page_is_page_zero() -> None:
    assert np.asarray(mosaic_gpu.first_page_of(None)).tolist() == [0]
    given = mosaic_gpu.first_page_of(jnp.array([7], jnp.int8))
    assert given.dtype == jnp.int32 and np.asarray(given).tolist() == [7]


def test_a_page_table_counts_from_the_pools_first_page() -> None:
    table = mosaic_gpu.PageTable(jnp.array([[3, 5], [0, 1]], jnp.int32), jnp.int32(100))
    assert [int(table[0, 1]), int(table[1, 0])] == [105, 100]
