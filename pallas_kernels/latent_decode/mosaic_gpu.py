"""Latent decode for NVIDIA Hopper in Pallas Mosaic GPU; see the README and `mosaic_kernel`."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import AttentionOptions
from pallas_kernels.latent_decode.mosaic_flash import Spec
from pallas_kernels.latent_decode.mosaic_kernel import attend
from pallas_kernels.mosaic_flash import ROWS
from pallas_kernels.mosaic_gpu import first_page_of
from pallas_kernels.paged_decode.plan import DecodePlan, make_plan

# of the grid at most, and of a share at least; not tuned
BLOCKS = 132
MIN_TILES = 4
# what shared memory and registers hold
MOST_WIDTH = 576
MOST_VALUE = 512


def plan(
    lengths_B: Array, *, heads: int, no_split: bool = False, blocks: int = BLOCKS
) -> DecodePlan:
    """The split plan of one step, computed once for all layers; `heads` are those of one device."""
    tiles = -(-heads // ROWS)
    return make_plan(
        lengths_B,
        tile=ROWS,
        splits=max(1, blocks // tiles),
        min_tiles=MIN_TILES,
        window=None,
        flags=tiles,
        no_split=no_split,
    )


def check(q: Array, pages: Array, value_dim: int) -> None:
    """Raise ValueError for shapes and types that the kernel does not take."""
    _, N, W = q.shape
    _, C, width = pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pages.dtype != q.dtype:
        raise ValueError(
            f"mosaic_gpu latent_decode takes bfloat16 or float16 throughout, got q {q.dtype}, "
            f"pages {pages.dtype}"
        )
    if W % 64:
        raise ValueError(
            f"mosaic_gpu latent_decode takes no latent entries of {W} numbers, but a multiple of 64"
        )
    if W != width or W > MOST_WIDTH or value_dim % 128 or value_dim > min(W, MOST_VALUE):
        raise ValueError(
            f"mosaic_gpu latent_decode takes up to {MOST_WIDTH} numbers of a key, a multiple of "
            f"64, and {MOST_VALUE} of a value, a multiple of 128, got q {q.shape}, "
            f"pages {pages.shape}, values {value_dim}"
        )
    if C not in (16, 32, 64, 128):
        raise ValueError(
            f"mosaic_gpu latent_decode takes pages of 16, 32, 64 or 128 tokens, got {C}"
        )
    if N % 8 or (N > ROWS and N % ROWS):
        raise ValueError(
            "mosaic_gpu latent_decode takes query heads in a multiple of 8 up to 64, or of 64, "
            f"got {N}"
        )


def latent_decode(
    q_BNW: Array,
    pages_PCW: Array,
    page_table_BM: Array,
    lengths_B: Array,
    *,
    value_dim: int,
    interpret: Any = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.latent_decode`. The option `plan` is what `plan(lengths_B, ...)` gives.

    Raises ValueError for what `check` names. `interpret` is a `plgpu.InterpretGPUParams` for
    machines without a GPU.
    """
    check(q_BNW, pages_PCW, value_dim)
    B, N, W = q_BNW.shape
    planned = options.get("plan") or plan(
        lengths_B, heads=N, no_split=options.get("no_split", False)
    )
    spec = Spec(
        B=B,
        N=N,
        heads=min(N, ROWS),
        W=W,
        V=value_dim,
        C=pages_PCW.shape[1],
        dtype=q_BNW.dtype,
        scale=options["scale"],
        interpret=interpret,
    )
    rows = (
        page_table_BM.astype(jnp.int32),
        first_page_of(options.get("first_page")),
        lengths_B.astype(jnp.int32),
    )
    return attend(spec, q_BNW, pages_PCW, rows, planned)
