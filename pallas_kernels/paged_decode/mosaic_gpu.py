"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU: bandwidth-bound, every thread
block reads an equal share of the KV.

One launch (`mosaic_kernel`). A producer warpgroup streams (page, head) tiles through a ring of TMA
copies. A consumer warpgroup does flash attention on the tensor cores, with the query group of one
KV head in the first rows of a 64-row tile; rows are independent, so the others may hold anything.

A row that lies in one split is written at once. Of a row that crosses cuts, the later splits (its
followers) leave parts in device memory, normalised output and log2-sum-exp, and raise a flag. The
row's first split (its owner) waits for the flag. It merges the parts as one more attention step:
the log-sums are the scores and the parts' outputs are the values.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import AttentionOptions, pools_of
from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.mosaic_gpu import check_pages, first_page_of
from pallas_kernels.mosaic_gpu import head_dims as head_dims
from pallas_kernels.paged_decode.mosaic_cluster import attend_clusters
from pallas_kernels.paged_decode.mosaic_flash import TILE, Spec, Tuning
from pallas_kernels.paged_decode.mosaic_kernel import attend
from pallas_kernels.paged_decode.mosaic_peers import PAD
from pallas_kernels.paged_decode.plan import DecodePlan, make_plan

# Number of rows whose sizes serve `no_split`: however few rows there are, no two blocks share one
MANY = 10**5
TILE_TOKENS = TILE  # keys that are read at once, seen or not
MOST_CLUSTERED = 16  # query heads of a block in a cluster
NARROW_HEADS = 16  # query heads of a block over 8-bit pages
SHARED_BYTES = 224 << 10  # of a block, without barriers and small buffers
TUNED = pathlib.Path(__file__).parent / "tuned" / "nvidia_h200.json"


@functools.cache
def default_tuning(head_dim: int, itemsize: int = 2, rows: int = 0, kv_heads: int = 0) -> Tuning:
    """The sizes in `tuned/` for a head dimension, bytes of a number in the pages, and the rows and
    KV heads of one device. Rows 0: the sizes for any number of rows.

    The ring, the queries and the output tile fit 227 KB of shared memory.
    """
    return tuning_of(json.loads(TUNED.read_text()), head_dim, itemsize, rows, kv_heads)


def tuning_of(
    tuned: dict[str, Any], head_dim: int, itemsize: int, rows: int, kv_heads: int
) -> Tuning:
    """The sizes in the content of a file of `tuned/`.

    `head_dim` holds the sizes of each head dimension. `cases` lists exceptions: (head_dim, rows
    [from, to], kv_heads, sizes that differ). The first that matches counts. Pages of 8 bits have a
    `head_dim, 8 bits` and `cases, 8 bits` of their own.
    """
    bits = ", 8 bits" if itemsize == 1 else ""
    common = Tuning(**tuned["head_dim" + bits][str(head_dim)])
    for case in tuned["cases" + bits]:
        first, last = case["rows"]
        if case["head_dim"] == head_dim and first <= rows <= last and kv_heads in case["kv_heads"]:
            return common._replace(**case["sizes"])
    return common


# Clusters of each size that fit on the chip at once, with one block per multiprocessor. A cluster
# lies in one GPC. An H200 has eight, with 14 to 18 multiprocessors each and 132 in all.
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 28, 8: 14, 16: 6}


def splits_of(heads: int, tuning: Tuning) -> int:
    """Splits of the grid: one block per streaming multiprocessor over all `heads`, which are KV
    heads or their tiles; a split is a block or a cluster of blocks.

    There are no more clusters than run at once. An owner waits for its followers: if owners filled
    the chip before the followers start, none would end. One split per head is always safe, since
    it has no followers.
    """
    if not tuning.cluster:
        return max(1, tuning.blocks // heads)
    return max(1, min(tuning.blocks // tuning.cluster, CLUSTERS_AT_ONCE[tuning.cluster]) // heads)


def tiles_of(heads: int, kv_heads: int, itemsize: int) -> tuple[int, int]:
    """Blocks of a KV head, and the query heads of each.

    A block's tile has 64 rows, and costs the same however many of them are queries. Over 8-bit
    pages a block takes 16 query heads, which is what its registers hold.
    """
    group = heads // kv_heads
    tiles = -(-group // (ROWS if itemsize == 2 else NARROW_HEADS))
    return tiles, -(-group // tiles)


def padded_heads(heads: int) -> int:
    """Rows of a part: the next power of two, so that parts fill a tile, and 8 at least."""
    return max(8, 1 << (heads - 1).bit_length())


def fitting(tuning: Tuning, head_dim: int, group: int) -> Tuning:
    """The same sizes with no more slots than fit beside what keys for rows keep of a group: its
    queries, two buffers of float32 outputs, and the weights of a tile."""
    kept = padded_heads(group) * (2 * tuning.queries * head_dim + 8 * (head_dim + PAD) + 2 * TILE)
    return tuning._replace(
        stages=min(tuning.stages, (SHARED_BYTES - kept) // (4 * TILE * head_dim))
    )


def sizes_of(head_dim: int, itemsize: int, rows: int, heads: int, kv_heads: int) -> Tuning:
    """The tuned sizes for the query heads of one device, too.

    Blocks of more than 16 query heads meet by flags, since clusters merge at most 16. A part of
    theirs is a large share of a tile, so their shares are longer: merging must not outweigh
    reading.
    """
    if heads // kv_heads <= MOST_CLUSTERED:
        tuning = default_tuning(head_dim, itemsize, rows, kv_heads)
        if tuning.swapped:
            return fitting(tuning, head_dim, heads // kv_heads)
        return tuning
    tuning = default_tuning(head_dim, itemsize)  # cases have sizes of clusters
    group = padded_heads(tiles_of(heads, kv_heads, itemsize)[1])
    shortest = max(tuning.min_tiles, group // 8)
    return tuning._replace(cluster=0, swapped=False, min_tiles=shortest)


def plan(
    lengths_B: Array,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int = 2,
    window: int | None = None,
    no_split: bool = False,
    tuning: Tuning | None = None,
) -> DecodePlan:
    """The split plan of one step, computed once for all layers with the same `window` and bytes of
    a number in the pages. `heads` and `kv_heads` are those of one device.

    With `no_split` no row is split between blocks. Raises ValueError for `no_split` with clusters
    of several blocks.
    """
    rows = MANY if no_split else lengths_B.shape[0]
    tuning = tuning or sizes_of(head_dim, itemsize, rows, heads, kv_heads)
    if no_split and tuning.cluster > 1:
        raise ValueError(
            f"clusters of {tuning.cluster} blocks split rows, which no_split forbids; "
            "take a cluster of 1"
        )
    blocks = kv_heads * tiles_of(heads, kv_heads, itemsize)[0]
    return make_plan(
        lengths_B,
        tile=TILE,
        splits=splits_of(blocks, tuning),
        min_tiles=tuning.min_tiles,
        window=window,
        flags=blocks * max(1, tuning.cluster),
        merge=tuning.merge * max(1, tuning.cluster),
        no_split=no_split,
    )


def check(q: Array, k_pages: Array, v_pages: Array) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    check_pages("decode", q, k_pages, v_pages)
    N = q.shape[1]
    K = k_pages.shape[1]
    if N % K:
        raise ValueError(
            f"mosaic_gpu decode takes a whole number of query heads a KV head, got {N} over {K}"
        )


def decode_attention(
    q_BNH: Array,
    k_pages: Array,
    v_pages: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.paged_decode`. The option `plan` is this module's `plan(lengths_B, ...)`
    of the same window, `no_split` and tuning.

    bfloat16 or float16, and pages of the same or of 8-bit floats; head_dim 64, 96 (16-bit pages
    alone), 128, 256; pages of 16 to 128 tokens (64 and 128 in 8 bits); any group of query heads.
    Raises ValueError otherwise, and for clusters with more than 16 query heads a block. `interpret`
    is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(q_BNH, k_pages, v_pages)
    B, N, H = q_BNH.shape
    _, K, C, _ = k_pages.shape
    itemsize = k_pages.dtype.itemsize
    window = options.get("window")
    no_split = options.get("no_split", False)
    tiles, G = tiles_of(N, K, itemsize)
    group = padded_heads(G)
    tuning = tuning or sizes_of(H, itemsize, MANY if no_split else B, N, K)
    if tuning.cluster and N // K > MOST_CLUSTERED:
        raise ValueError(
            f"clusters merge up to {MOST_CLUSTERED} query heads a KV head, got {N} over {K}; "
            "set cluster to 0"
        )
    if G > 8:
        tuning = tuning._replace(consumers=1)  # two have too few registers for larger groups
    planned = options.get("plan") or plan(
        lengths_B,
        heads=N,
        kv_heads=K,
        head_dim=H,
        itemsize=itemsize,
        window=window,
        no_split=no_split,
        tuning=tuning,
    )
    pools = pools_of(k_pages, v_pages, options)
    spec = Spec(
        B=B,
        N=N,
        K=K * tiles,
        G=G,
        H=H,
        C=C,
        group=group,
        tiles=tiles,
        dtype=q_BNH.dtype,
        kv_dtype=k_pages.dtype.name if len(pools) > 2 else None,
        scale=options["scale"],
        window=window,
        softcap=options.get("softcap"),
        tuning=tuning,
        interpret=interpret,
    )
    q_QH = q_BNH.reshape(B * N, H)
    if B * N < spec.group:
        q_QH = jnp.pad(q_QH, ((0, spec.group - B * N), (0, 0)))
    if tuning.swapped and spec.kv_dtype is not None:
        raise ValueError("keys for rows take 16-bit pages; set swapped to False")
    if tuning.consumers > 1 and (spec.kv_dtype is None or tuning.stages % 2):
        raise ValueError(
            "two consumers take 8-bit pages and an even number of stages; "
            f"got {k_pages.dtype} and {tuning.stages}; set consumers to 1"
        )
    rows = (
        page_table_BM.astype(jnp.int32),
        first_page_of(options.get("first_page")),
        lengths_B.astype(jnp.int32),
    )
    run = attend_clusters if tuning.cluster else attend
    return run(spec, q_QH, pools, rows, planned, options.get("sinks"))
