"""Latent attention of prompt chunks in pure JAX: each token is a row of latent decode, which ends
at its position."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backends import AttentionOptions
from pallas_kernels.latent_decode import reference
from pallas_kernels.latent_decode.rows import UpProjections, absorbed, projected


def token_rows(
    page_table_RM: Array, starts_R: Array, lengths_R: Array, kv_lengths_R: Array, tokens: int
) -> tuple[Array, Array]:
    """The page table of each token `[T, M]`, and the tokens it sees `[T]`, 0 for one of no row."""
    index_T1 = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    own_TR = (index_T1 >= starts_R) & (index_T1 < starts_R + lengths_R)
    row_T = jnp.argmax(own_TR, axis=1)
    seen_TR = kv_lengths_R - lengths_R + index_T1 - starts_R + 1
    seen_T = jnp.sum(jnp.where(own_TR, seen_TR, 0), axis=1, dtype=jnp.int32)
    return page_table_RM[row_T], seen_T


def latent_extend(
    q_TNH: Array,
    up: UpProjections,
    pages_PCW: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.latent_extend`."""
    rows = token_rows(page_table_RM, starts_R, lengths_R, kv_lengths_R, q_TNH.shape[0])
    value_dim = up.keys_NEV.shape[-1]
    o_TNV = reference.latent_decode(
        absorbed(q_TNH, up), pages_PCW, *rows, value_dim=value_dim, **options
    )
    return projected(o_TNV, up)
