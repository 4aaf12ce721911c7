"""Writing a step's keys and values into their pages."""

from __future__ import annotations

from jax import Array

from pallas_kernels.backends import Backends

BACKENDS = Backends(__name__, "write", ("reference",))


def write(
    k_pages: Array, v_pages: Array, k_TKH: Array, v_TKH: Array, page_T: Array, offset_T: Array, *, backend: str
) -> tuple[Array, Array]:
    """Put token t's key and value at `[page_T[t], :, offset_T[t]]` of `k_pages` and `v_pages` `[P, K, C, H]`; returns the new pages.

    A page index of P or more drops the token; -1 would wrap around and must not be used. No two kept tokens share a place.
    Under donation the pages are updated in place. Raises `UnknownBackend` for a name not in `BACKENDS`.
    """
    return BACKENDS[backend](k_pages, v_pages, k_TKH, v_TKH, page_T, offset_T)
