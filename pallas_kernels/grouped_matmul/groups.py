"""Tokens sorted by expert, on the device.

The rows of each expert fill tiles of `tile` rows, so that a tile has one expert and begins at a
multiple of its height. There is no capacity: the tiles suffice for any choice of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

SMALLEST_TILE, LARGEST_TILE = 8, 128  # rows


class Groups(NamedTuple):
    """The rows of all experts, tile by tile, int32. Tiles of one expert are neighbours.

    Attributes:
        expert_W: expert of each tile.
        rows_W: rows of each tile that tokens take, from its first; 0 = tile not in use. Tiles in
            use come first.
        used: `[1]`, number of tiles in use.
        token_P: token of each row; 0 for a row that no token takes.
        place_TK: row of each token and choice.
    """

    expert_W: Array
    rows_W: Array
    used: Array
    token_P: Array
    place_TK: Array

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.token_P.shape[0] // self.expert_W.shape[0]


def tile_for(tokens: int, choices: int, experts: int) -> int:
    """Rows of a tile that holds nearly every expert's share of tokens that choose alike: the mean
    and three standard deviations, as a power of two."""
    mean = tokens * choices / experts
    wanted, tile = min(mean + 3 * mean**0.5, tokens), SMALLEST_TILE
    while tile < min(wanted, LARGEST_TILE):
        tile *= 2
    return tile


def tiles_of(tokens: int, choices: int, experts: int, tile: int) -> int:
    """Tiles that suffice, whatever the tokens choose: one of each expert is partly filled."""
    rows = tokens * choices
    partly = min(experts, rows)
    return partly + (rows - partly) // tile


def group_tokens(expert_TK: Array, experts: int, tile: int) -> Groups:
    """Sort tokens by their K experts, all different; tokens of one expert keep their order."""
    tokens, choices = expert_TK.shape
    tiles = tiles_of(tokens, choices, experts, tile)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    chosen_TKE = expert_TK[:, :, None] == expert_E
    chosen_TE = jnp.any(chosen_TKE, axis=1)
    until_TE = jnp.cumsum(chosen_TE, axis=0, dtype=jnp.int32)
    size_E = until_TE[-1]
    tiles_E = -(-size_E // tile)
    # A masked sum becomes one launch on a GPU, a scan of so few numbers three
    first_E = jnp.sum(jnp.where(expert_E < expert_E[:, None], tiles_E, 0), axis=1)
    row_TE = first_E * tile + until_TE - 1
    place_TK = jnp.sum(jnp.where(chosen_TKE, row_TE[:, None], 0), axis=2)
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    token_P = jnp.zeros((tiles * tile,), jnp.int32)
    token_P = token_P.at[place_TK].set(token_T[:, None], unique_indices=True)
    tile_W = jnp.arange(tiles, dtype=jnp.int32)
    mine_WE = (tile_W[:, None] >= first_E) & (tile_W[:, None] < first_E + tiles_E)
    left_WE = jnp.minimum(size_E - (tile_W[:, None] - first_E) * tile, tile)
    return Groups(
        expert_W=jnp.sum(jnp.where(mine_WE, expert_E, 0), axis=1),
        rows_W=jnp.sum(jnp.where(mine_WE, left_WE, 0), axis=1),
        used=jnp.sum(tiles_E, dtype=jnp.int32)[None],
        token_P=token_P,
        place_TK=place_TK,
    )


def combine(y_PD: Array, groups: Groups, weight_TK: Array) -> Array:
    """Each token's rows times its weights (float32), summed in float32; `[T, D]` in y's dtype."""
    y_TKD = y_PD[groups.place_TK].astype(jnp.float32)
    return jnp.sum(y_TKD * weight_TK[:, :, None], axis=1).astype(y_PD.dtype)
