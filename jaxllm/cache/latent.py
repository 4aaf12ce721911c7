"""Latent attention over pages: entries are written, then decode rows and chunks attend."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.cache.arrays import PagedArrays
from jaxllm.cache.step import PagedInputs, Plans, StaticOptions
from pallas_kernels import latent_decode, latent_extend
from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.latent_decode import LatentRows, absorbed, projected


def plan(static: StaticOptions, inputs: PagedInputs, pages: Array, rows: LatentRows) -> Plans:
    """One plan for all layers."""
    B = inputs.decode_lengths_B.shape[0]
    tokens = rows.q_TNH.shape[0]
    heads = rows.q_TNH.shape[1]
    plan_decode = latent_decode.BACKENDS.planner(static.backend)
    plan_extend = latent_extend.BACKENDS.planner(static.backend)
    decode = extend = None
    if B and plan_decode is not None:
        decode = plan_decode(inputs.decode_lengths_B, heads=heads, no_split=static.no_split)
    if tokens > B and plan_extend is not None:
        extend = plan_extend(
            inputs.chunk_tables_RM,
            *inputs.chunks,
            tokens=tokens - B,
            heads=heads,
            widths=(rows.q_TNH.shape[-1], rows.up.values_NFV.shape[1]),
            page_size=pages.shape[2],
            no_split=static.no_split,
        )
    return Plans(decode, extend)


# One inner jit, so that a model's layers share a trace
@functools.partial(jax.jit, static_argnums=0)
def write_and_attend(
    static: StaticOptions,
    rows: LatentRows,
    arrays: PagedArrays,
    inputs: PagedInputs,
    plans: Plans,
    first_page: Array,
) -> tuple[Array, PagedArrays, Plans]:
    """Outputs `o_TNF`, the pages with the entries, and the plans as the kernels leave them."""
    plans = Plans(*map(open_plan, plans))
    (entries,) = arrays.planes
    entries = _write(entries, rows.entry_TW, inputs, first_page)
    pages_PCW = entries.reshape(-1, *entries.shape[2:])
    up = rows.up
    options: dict[str, Any] = {
        "backend": static.backend,
        "scale": static.scale,
        "first_page": first_page,
        "no_split": static.no_split,
    }
    B = inputs.decode_lengths_B.shape[0]
    parts: list[Array] = []
    if B:
        table = (inputs.decode_tables_BM, inputs.decode_lengths_B)
        o_BNV = latent_decode.latent_decode(
            absorbed(rows.q_TNH[:B], up),
            pages_PCW,
            *table,
            value_dim=up.keys_NEV.shape[-1],
            plan=plans.decode,
            **options,
        )
        parts.append(projected(o_BNV, up))
    if rows.q_TNH.shape[0] > B:
        places = (inputs.chunk_tables_RM, *inputs.chunks)
        parts.append(
            latent_extend.latent_extend(
                rows.q_TNH[B:], up, pages_PCW, *places, plan=plans.extend, **options
            )
        )
    o_TNF = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return o_TNF, replace(arrays, planes=(entries,)), Plans(*map(close_plan, plans))


def _write(pages: Array, entry_TW: Array, inputs: PagedInputs, first_page: Array) -> Array:
    """The pages `[P, 1, C, W]` with each token's entry; in place where they are donated."""
    P, _, C, W = pages.shape
    page_T = inputs.write_page_T + first_page
    # Dropped tokens get a page each, so that indices are unique
    beyond_T = P + jnp.arange(page_T.shape[0], dtype=page_T.dtype)
    row_T = jnp.where(page_T < P, page_T, beyond_T) * C + inputs.write_offset_T
    flat = pages.reshape(-1, W).at[row_T]
    written = flat.set(entry_TW.astype(pages.dtype), mode="drop", unique_indices=True)
    return written.reshape(pages.shape)
