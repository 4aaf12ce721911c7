"""Grouped products in plain JAX, tile by tile: the oracle, for every shape and type. No temporary
is larger than one expert's weight or the result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.ordering import zeros_after


def grouped_matmul(
    x_PI: Array,
    w_EOI: Array,
    groups: Groups,
    bias_EO: Array | None,
    gating: Callable[[Array, Array], Array] | None,
) -> Array:
    """See `pallas_kernels.grouped_matmul`."""
    precision = None
    if x_PI.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST

    def product(x_RI: Array, expert: Array) -> Array:
        return lax.dot_general(
            x_RI,
            w_EOI[expert],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    return by_tile(product, x_PI, groups, bias_EO, gating)


def by_tile(
    product: Callable[[Array, Array], Array],
    x_PI: Array,
    groups: Groups,
    bias_EO: Array | None,
    gating: Callable[[Array, Array], Array] | None,
) -> Array:
    """The same, where `product(x_RI, expert)` gives `y_RO` of one tile's rows."""

    def tile_of(x_RI: Array, expert: Array) -> Array:
        y_RO = product(x_RI, expert).astype(jnp.float32)
        if bias_EO is not None:
            y_RO = y_RO + bias_EO[expert].astype(jnp.float32)
        if gating is None:
            y = y_RO
        else:
            y = gating(*jnp.split(y_RO, 2, axis=1))
        return y.astype(x_PI.dtype)

    (tiles,) = groups.expert_W.shape
    tile = groups.tile
    I = x_PI.shape[1]
    if groups.shared and x_PI.shape[0] < groups.rows:
        x_RI = jnp.pad(x_PI, ((0, tile - x_PI.shape[0]), (0, 0)))
        x_WRI = jnp.broadcast_to(x_RI, (tiles, tile, I))
    else:
        if x_PI.shape[0] != groups.rows:
            x_PI = groups.rows_of(x_PI)
        x_WRI = x_PI.reshape(tiles, tile, I)
    width = jax.eval_shape(tile_of, x_WRI[0], groups.expert_W[0]).shape[1]
    x_WRI, zeros_WRO = zeros_after(x_WRI, (tiles, tile, width), x_PI.dtype)

    def step(number: Array, y_WRO: Array) -> Array:
        return y_WRO.at[number].set(tile_of(x_WRI[number], groups.expert_W[number]))

    return lax.fori_loop(0, tiles, step, zeros_WRO).reshape(groups.rows, width)
