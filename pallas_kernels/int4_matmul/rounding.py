"""Plain weights as numbers of 4 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.int4_matmul.packed import TABLES

LARGEST = 15


def rounded(plain_OI: Array, group: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Numbers `[O, I]` (uint8), and scales and zero points `[O, G]` of `dtype`, the nearest to
    plain weights. A group's range holds 0, which stays exact."""
    rows, columns = plain_OI.shape
    full = jnp.pad(plain_OI.astype(jnp.float32), ((0, 0), (0, -columns % group)))
    parts = full.reshape(rows, -1, group)
    low = jnp.minimum(parts.min(-1, keepdims=True), 0)
    high = jnp.maximum(parts.max(-1, keepdims=True), 0)
    scale = jnp.where(high > low, (high - low) / LARGEST, 1).astype(dtype)
    wide = scale.astype(jnp.float32)
    zero = jnp.clip(jnp.round(-low / wide), 0, LARGEST)
    numbers = jnp.clip(jnp.round(parts / wide) + zero, 0, LARGEST)
    flat = numbers.reshape(rows, -1)[:, :columns]
    return flat.astype(jnp.uint8), scale[..., 0], zero[..., 0].astype(dtype)


def nearest(plain_OI: Array, group: int, dtype: Any, table: str) -> tuple[Array, Array]:
    """Numbers `[O, I]` (uint8) that stand for the nearest values of a table, and scales `[O, G]` of
    `dtype`, with which the largest weight of a group is the table's largest value."""
    rows, columns = plain_OI.shape
    values = np.array(TABLES[table], np.float32)
    full = jnp.pad(plain_OI.astype(jnp.float32), ((0, 0), (0, -columns % group)))
    parts = full.reshape(rows, -1, group)
    largest = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / values.max(), 1).astype(dtype)
    order = np.argsort(values, stable=True)
    ascending = values[order]
    place = jnp.searchsorted((ascending[1:] + ascending[:-1]) / 2, parts / scale)
    numbers = jnp.asarray(order, jnp.uint8)[place].reshape(rows, -1)[:, :columns]
    return numbers, scale[..., 0]
