"""The rows of experts' tiles as numbers of 8 bits, rounded as `rounding` says: of tokens before
they are copied to the rows that they take, or of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu import tile_rows
from pallas_kernels.scaled_matmul import mosaic_rounding
from pallas_kernels.scaled_matmul.rounding import rounded_by, rounded_inputs


class Rows(NamedTuple):
    """Numbers `[R, I]` and float32 scales `[G, R]`, of the rows of all tiles or of those that all
    tiles share; what no token takes is anything."""

    numbers: Array
    scales: Array


def expert_rows(
    x: Array,
    dtype: Any,
    groups: Groups,
    inputs: str,
    given_E: Array | None,
    group: int,
    interpret: Any,
) -> Rows:
    """`x` are tokens or rows; `given_E` are the scales of "given" inputs of each expert."""
    if inputs == "given":
        assert given_E is not None
        return _by_expert(x, dtype, groups, given_E, interpret)
    tokens = groups.place_TK.shape[0]
    whole = x.shape[0] == groups.rows
    if whole or not groups.shared:
        room = groups.rows
    else:
        room = groups.tile
    if whole or groups.shared:
        places = None
    else:
        places = groups.place_TK
    if inputs == "token" and mosaic_rounding.takes(x, dtype):
        taken = None
        if whole:
            taken = (groups.rows_W, groups.tile)
        made = mosaic_rounding.rounded_rows(
            x, room, places_TK=places, taken=taken, interpret=interpret
        )
        return Rows(made.numbers, made.scale[None])
    numbers, scale = rounded_inputs(x, dtype, group, inputs)
    if places is None:
        missing = ((0, room - x.shape[0]), (0, 0))
        return Rows(jnp.pad(numbers, missing), jnp.pad(scale, missing).T)
    assert groups.token_P is not None and tokens == x.shape[0]
    bits = tile_rows(lax.bitcast_convert_type(numbers, jnp.int8), groups, interpret)
    return Rows(lax.bitcast_convert_type(bits, dtype), scale.T[:, groups.token_P])


def _by_expert(x: Array, dtype: Any, groups: Groups, given_E: Array, interpret: Any) -> Rows:
    """Rows rounded with the scales of their experts."""
    (tiles,) = groups.expert_W.shape
    tile = groups.tile
    x = tile_rows(x, groups, interpret)
    if x.shape[0] < groups.rows:
        x = jnp.tile(jnp.pad(x, ((0, tile - x.shape[0]), (0, 0))), (tiles, 1))
    scale_P = jnp.repeat(given_E[groups.expert_W].astype(jnp.float32), tile)
    return Rows(rounded_by(x, scale_P[:, None], dtype), scale_P[None])
