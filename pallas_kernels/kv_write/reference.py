"""Writing keys and values into pages with one XLA scatter each; in place when the pages are donated."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def write(k_pages: Array, v_pages: Array, k_TKH: Array, v_TKH: Array, page_T: Array, offset_T: Array) -> tuple[Array, Array]:
    """See `pallas_kernels.kv_write`."""
    num_pages = k_pages.shape[0]
    # Dropped tokens get a page each, so that "unique_indices" holds and no back end needs to order or guard the writes.
    page_T = jnp.where(page_T < num_pages, page_T, num_pages + jnp.arange(page_T.shape[0], dtype=page_T.dtype))

    def put(pages: Array, new_TKH: Array) -> Array:
        return pages.at[page_T, :, offset_T].set(new_TKH.astype(pages.dtype), mode="drop", unique_indices=True)

    return put(k_pages, k_TKH), put(v_pages, v_TKH)
