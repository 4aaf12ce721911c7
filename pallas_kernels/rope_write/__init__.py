"""The step between a layer's fused projection and its attention: bias, QK-norm, rotation, and the
write of keys and values."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends
from pallas_kernels.rope_write.rows import HeadRows as HeadRows
from pallas_kernels.rope_write.rows import rotated as rotated
from pallas_kernels.rope_write.rows import turned as turned
from pallas_kernels.target import ANYWHERE, HOPPER

BACKENDS = Backends(__name__, "rope_write", {"reference": ANYWHERE, "mosaic_gpu": HOPPER})


def rope_write(
    rows: HeadRows,
    k_pages: Array,
    v_pages: Array,
    page_T: Array,
    offset_T: Array,
    first_page: Array | None = None,
    *,
    scales: Array | None = None,
    backend: str,
) -> tuple[Array, ...]:
    """Write token t's key and value to `[page_T[t], :, offset_T[t]]` of `k_pages` and `v_pages`
    `[P, K, C, H]`; returns `q_TNH` and the pools.

    `rows.qkv` is `[T, N + 2K, H]`; bias, norm and rotation are those of `rotated`. `first_page`
    (int32 `[1]`), a layer's first page in a pool of several, is added to page indices. A sum of P
    or more drops the token's key and value. A negative index wraps around and is not allowed. No
    two kept tokens share a place. Donated pages are updated in place. Raises `UnknownBackend` for a
    name not in `BACKENDS`.

    Pages of 8-bit floats come with `scales` `[P, K, 2, C]`, which are then the last of the pools.
    Each token's key and value get the scale that `pallas_kernels.quantised` finds for them, or that
    of `rows.kv_scales`, in the type that scales are stored in.
    """
    places = (page_T, offset_T, first_page)
    return BACKENDS[backend](rows, k_pages, v_pages, *places, scales=scales)


def beside(attention: str) -> str:
    """The back end of the write beside one of attention: its own, or the reference where it has
    none, since XLA's scatter is in place, too."""
    if attention in BACKENDS:
        return attention
    return next(iter(BACKENDS))
