"""Paged attention of ragged prompt chunks for NVIDIA Hopper in Pallas Mosaic GPU: causal after a
cached prefix.

One launch (`mosaic_kernel`). Every thread block computes an equal share of all (query tile, key
tile) pairs of one KV head, so a few queries after a long prefix fill the card as well as a long
prompt. A producer warpgroup walks the page table and fills a ring of K and V tiles by TMA. One or
two compute warpgroups of 64 query rows each do flash attention. They take turns on the tensor
cores: one multiplies while the other does its softmax.

In short steps the query heads of a KV head share a tile's rows. A query tile that crosses shares is
merged by the block that has its first keys, as in `paged_decode`.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import AttentionOptions, pools_of
from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.mosaic_gpu import HEAD_DIMS, check_pages, first_page_of
from pallas_kernels.mosaic_gpu import head_dims as head_dims
from pallas_kernels.paged_extend.mosaic_flash import Spec, Tuning
from pallas_kernels.paged_extend.mosaic_kernel import attend
from pallas_kernels.paged_extend.plan import Cut, ExtendPlan, make_plan

TILE_TOKENS = 128  # keys at most that are read at once, seen or not
MOST_SHARED = 32  # query heads that share one tile
UNEQUAL = ((192, 128),)  # widths of keys and of values that differ


@functools.cache
def default_tuning(head_dim: int, itemsize: int = 2) -> Tuning:
    """The sizes in `tuned/` for a head dimension and bytes of a number in the pages.

    The queries, the output and the ring fit 227 KB of shared memory. Sizes for 8 bits differ in
    the ring alone, so one plan serves both.
    """
    tuned = json.loads((pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    return Tuning(**tuned["head_dim" if itemsize == 2 else "head_dim, 8 bits"][str(head_dim)])


def shared_heads(tokens: int, group: int, tuning: Tuning) -> int:
    """Query heads that share one tile. Short steps would leave rows of a tile empty without
    sharing; in long steps sharing costs the rows that a group does not fill."""
    if tokens > max(tuning.shared_up_to, ROWS * tuning.groups - 1):
        return 1
    return max(n for n in range(1, MOST_SHARED + 1) if group % n == 0)


def plan(
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    no_split: bool = False,
    tuning: Tuning | None = None,
) -> ExtendPlan:
    """The split plan of one step over `tokens` tokens, computed once for all layers with the same
    `window`.

    `heads` and `kv_heads` are those of one device. With `no_split` no query tile is split between
    blocks.
    """
    tuning = tuning or default_tuning(head_dim)
    share = shared_heads(tokens, heads // kv_heads, tuning)
    cut = Cut(
        tokens=tokens,
        queries=(ROWS // share) * tuning.groups,
        keys=ROWS * tuning.groups,
        units=heads // kv_heads // share,
        splits=max(1, tuning.blocks // kv_heads),
        min_tiles=tuning.min_tiles,
        kv_heads=kv_heads,
        no_split=no_split,
    )
    return make_plan(starts_R, lengths_R, kv_lengths_R, cut=cut, window=window)


def stored(key: int, value: int) -> tuple[int, int]:
    """The narrowest keys and values that the kernel takes and these fit into, with zeros behind
    them. Raises ValueError where there are none."""
    pairs = sorted({*UNEQUAL, *((width, width) for width in HEAD_DIMS)})
    for pair in pairs:
        if key <= pair[0] and value <= pair[1]:
            return pair
    raise ValueError(f"mosaic_gpu extend takes keys and values up to {pairs[-1]}, got {key, value}")


def check(q: Array, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    check_pages("extend", q, k_pages, v_pages, UNEQUAL)
    N = q.shape[1]
    K = k_pages.shape[1]
    if N % K:
        raise ValueError(
            f"mosaic_gpu extend takes a whole number of query heads a KV head, got {N} over {K}"
        )


def extend_attention(
    q_TNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    tuning: Tuning | None = None,
    tokens_first: bool = False,
    interpret: Any = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_extend`. The option `plan` is this module's `plan(...)` for the
    same rows, window and tuning.

    bfloat16 or float16, and pages of the same or of 8-bit floats; head_dim 64, 128, 256, in 16
    bits also 96, or keys of 192 with values of 128; pages of 16 to 128 tokens (64 and 128 in 8
    bits). With `tokens_first` pages are `[P, C, K, H]`, in 16 bits alone. Raises ValueError
    otherwise. `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    usual = [_heads_first(pages) if tokens_first else pages for pages in (k_pages, v_pages)]
    check(q_TNH, *usual)
    T, N, H = q_TNH.shape
    _, K, C, _ = usual[0].shape
    tuning = tuning or default_tuning(H, k_pages.dtype.itemsize)
    window = options.get("window")
    planned = options.get("plan") or plan(
        starts_R,
        lengths_R,
        kv_lengths_R,
        tokens=T,
        heads=N,
        kv_heads=K,
        head_dim=H,
        window=window,
        no_split=options.get("no_split", False),
        tuning=tuning,
    )
    pools = pools_of(k_pages, v_pages, options)
    spec = Spec(
        T=T,
        K=K,
        G=N // K,
        share=shared_heads(T, N // K, tuning),
        H=H,
        F=v_pages.shape[3],
        C=C,
        dtype=q_TNH.dtype,
        kv_dtype=k_pages.dtype.name if len(pools) > 2 else None,
        scale=options["scale"],
        window=window,
        softcap=options.get("softcap"),
        tuning=tuning,
        tokens_first=tokens_first,
        interpret=interpret,
    )
    table = (page_table_RM.astype(jnp.int32), first_page_of(options.get("first_page")))
    return attend(spec, q_TNH, pools, table, planned, options.get("sinks"))


def _heads_first(pages: Array) -> Any:
    """The shape and type of pages `[P, C, K, H]` as if heads came first."""
    P, C, K, H = pages.shape
    return jax.ShapeDtypeStruct((P, K, C, H), pages.dtype)
