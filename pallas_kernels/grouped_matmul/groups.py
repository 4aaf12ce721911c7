"""Tokens sorted by expert, on the device.

The rows of each expert fill tiles of `tile` rows, so that a tile has one expert and begins at a
multiple of its height. There is no capacity: the tiles suffice for any choice of the tokens.

Few tokens are not sorted. Each expert that one of them chose gets a tile of all tokens, which costs
the tensor cores less than launches that sort and copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.parts import WeightedRows

# rows
SMALLEST_TILE = 8
LARGEST_TILE = 128
MOST_SHARED = 16  # tokens of a tile that all experts share
WORD = 32  # bits
MOST_PAIRS = 2**25  # of choices that are compared one by one


class Groups(NamedTuple):
    """The rows of all experts, tile by tile, int32. Tiles of one expert are neighbours.

    Attributes:
        expert_W: expert of each tile.
        rows_W: rows of each tile that tokens take, from its first; 0 = tile not in use. Tiles in
            use come first.
        used: its last entry is the number of tiles in use.
        token_P: token of each row; 0 for a row that no token takes. None: every tile holds all
            tokens in their order.
        place_TK: row of each token and choice.
        own_TK: which choices have a row here, of experts that several devices share; None: all.
    """

    expert_W: Array
    rows_W: Array
    used: Array
    token_P: Array | None
    place_TK: Array
    own_TK: Array | None = None

    @property
    def shared(self) -> int | None:
        """Tokens that every tile holds; None where tiles differ."""
        if self.token_P is None:
            return self.place_TK.shape[0]
        return None

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        if self.token_P is None:
            return shared_tile(self.place_TK.shape[0])
        return self.token_P.shape[0] // self.expert_W.shape[0]

    @property
    def rows(self) -> int:
        """Rows of all tiles."""
        return self.expert_W.shape[0] * self.tile

    def rows_of(self, x_TD: Array) -> Array:
        """The rows of all tiles, or the tokens themselves where every tile holds them."""
        if self.token_P is None:
            return x_TD
        return x_TD[self.token_P]


def tile_for(tokens: int, choices: int, experts: int) -> int:
    """Rows of a tile that holds nearly every expert's share of tokens that choose alike: the mean
    and three standard deviations, as a power of two."""
    mean = tokens * choices / experts
    wanted = min(mean + 3 * mean**0.5, tokens)
    tile = SMALLEST_TILE
    while tile < min(wanted, LARGEST_TILE):
        tile *= 2
    return tile


def tiles_of(tokens: int, choices: int, experts: int, tile: int) -> int:
    """Tiles that suffice, whatever the tokens choose: one of each expert is partly filled."""
    rows = tokens * choices
    partly = min(experts, rows)
    return partly + (rows - partly) // tile


def group(expert_TK: Array, experts: int) -> Groups:
    """The tokens of a step by their K experts, all different, in the form that costs least."""
    tokens, choices = expert_TK.shape
    if tokens <= MOST_SHARED:
        return share_tokens(expert_TK, experts)
    return group_tokens(expert_TK, experts, tile_for(tokens, choices, experts))


def share_tokens(expert_TK: Array, experts: int) -> Groups:
    """A tile of all tokens for each expert that one of them chose.

    Which experts were chosen is a mask of bits. All else follows from counts of bits, element by
    element, so that a GPU needs two launches, and none for one token.
    """
    tokens, choices = expert_TK.shape
    tile = shared_tile(expert_TK.shape[0])
    if tokens == 1:
        # Constants of the program; XLA would compute one of equal entries or equal steps
        used = np.array([0, 0, choices], np.int32)
        places = np.arange(choices, dtype=np.int32)
        rows_W = np.ones(choices, np.int32)
        return Groups(expert_TK[0].astype(jnp.int32), rows_W, used, None, tile * places[None])
    tile_W = jnp.arange(min(experts, tokens * choices), dtype=jnp.int32)
    below = _chosen_below(expert_TK, experts)
    used = jnp.broadcast_to(below(experts), tile_W.shape)  # as long as the others: one launch
    return Groups(
        expert_W=_last_below(below, tile_W, experts),
        rows_W=jnp.where(tile_W < used, tokens, 0),
        used=used,
        token_P=None,
        place_TK=below(expert_TK) * tile + jnp.arange(tokens, dtype=jnp.int32)[:, None],
    )


def shared_tile(tokens: int) -> int:
    """Rows of a tile that holds all of few tokens."""
    if tokens <= SMALLEST_TILE:
        return SMALLEST_TILE
    return MOST_SHARED


def _chosen_below(expert_TK: Array, experts: int) -> Callable[[Array | int], Array]:
    """A function that counts, element by element, the chosen experts of lower numbers."""
    first_B = jnp.arange(0, experts, WORD, dtype=jnp.int32)
    place_NB = expert_TK.reshape(-1, 1) - first_B
    bit_NB = jnp.uint32(1) << (place_NB % WORD).astype(jnp.uint32)
    bit_NB = jnp.where((place_NB >= 0) & (place_NB < WORD), bit_NB, jnp.uint32(0))
    mask_B = lax.reduce(bit_NB, jnp.uint32(0), lax.bitwise_or, (0,))

    def below(expert: Array | int) -> Array:
        count = jnp.int32(0)
        for word in range(mask_B.shape[0]):
            bits = jnp.clip(expert - word * WORD, 0, WORD)
            kept = jnp.uint32(2**WORD - 1) >> (WORD - bits).astype(jnp.uint32)
            kept = jnp.where(bits == 0, jnp.uint32(0), kept)  # no shift by a whole word
            count += lax.population_count(mask_B[word] & kept).astype(jnp.int32)
        return count

    return below


def _last_below(below: Callable[[Array], Array], wanted_W: Array, experts: int) -> Array:
    """The last expert that has at most `wanted_W` chosen experts below it, by bisection."""
    found_W = jnp.zeros_like(wanted_W)
    for bit in reversed(range((experts - 1).bit_length())):
        next_W = found_W + (1 << bit)
        found_W = jnp.where((next_W < experts) & (below(next_W) <= wanted_W), next_W, found_W)
    return found_W


def group_tokens(expert_TK: Array, experts: int, tile: int) -> Groups:
    """Sort tokens by their K experts, all different; tokens of one expert keep their order."""
    tokens, choices = expert_TK.shape
    tiles = tiles_of(tokens, choices, experts, tile)
    rank_TK, size_E = _ranks(expert_TK, experts)
    tiles_E = -(-size_E // tile)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    # A masked sum becomes one launch on a GPU, a scan of so few numbers three
    expert_V1 = jnp.arange(experts + 1, dtype=jnp.int32)[:, None]
    first_V = jnp.sum(jnp.where(expert_E < expert_V1, tiles_E, 0), axis=1)
    place_TK = first_V[expert_TK] * tile + rank_TK
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    token_P = jnp.zeros((tiles * tile,), jnp.int32)
    token_P = token_P.at[place_TK].set(token_T[:, None], unique_indices=True)
    tile_W1 = jnp.arange(tiles, dtype=jnp.int32)[:, None]
    mine_WE = (tile_W1 >= first_V[:-1]) & (tile_W1 < first_V[1:])
    left_WE = jnp.minimum(size_E - (tile_W1 - first_V[:-1]) * tile, tile)
    return Groups(
        expert_W=jnp.sum(jnp.where(mine_WE, expert_E, 0), axis=1),
        rows_W=jnp.sum(jnp.where(mine_WE, left_WE, 0), axis=1),
        used=first_V,
        token_P=token_P,
        place_TK=place_TK,
    )


def _ranks(expert_TK: Array, experts: int) -> tuple[Array, Array]:
    """How many earlier tokens chose the expert of each choice, and how many chose each expert."""
    tokens, choices = expert_TK.shape
    N = tokens * choices
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    if N * (N + experts) <= MOST_PAIRS:
        # One launch on a GPU: what is asked of each choice, then of each expert
        asked_Q = jnp.concatenate([expert_TK.reshape(N).astype(jnp.int32), expert_E])
        number_Q = np.minimum(np.arange(N + experts, dtype=np.int32), N)
        earlier_QN = number_Q[:N] < number_Q[:, None]
        count_Q = jnp.sum((asked_Q[:N] == asked_Q[:, None]) & earlier_QN, axis=1, dtype=jnp.int32)
        return count_Q[:N].reshape(tokens, choices), count_Q[N:]
    chosen_TKE = expert_TK[:, :, None] == expert_E
    until_TE = jnp.cumsum(jnp.any(chosen_TKE, axis=1), axis=0, dtype=jnp.int32)
    rank_TK = jnp.sum(jnp.where(chosen_TKE, until_TE[:, None] - 1, 0), axis=2)
    return rank_TK, until_TE[-1]


def own_groups(groups: Groups, first: Array | int, count: int) -> Groups:
    """The rows of `count` experts from `first` on, numbered from 0: their tiles move before all
    others, in their order."""
    (tiles,) = groups.expert_W.shape
    tile = groups.tile
    number_W = jnp.arange(tiles, dtype=jnp.int32)
    expert_W = groups.expert_W - first
    own_W = (expert_W >= 0) & (expert_W < count) & (number_W < groups.used[-1])
    before_W = jnp.sum(own_W & (number_W < number_W[:, None]), axis=1, dtype=jnp.int32)
    total = jnp.sum(own_W, dtype=jnp.int32)
    moved_W = jnp.where(own_W, before_W, total + number_W - before_W)

    def ordered(x_W: Array) -> Array:
        return jnp.zeros_like(x_W).at[moved_W].set(x_W, unique_indices=True)

    old_TK = groups.place_TK // tile
    token_P = groups.token_P
    if token_P is not None:
        token_P = ordered(token_P.reshape(tiles, tile)).reshape(-1)
    return Groups(
        expert_W=ordered(jnp.where(own_W, expert_W, 0)),
        rows_W=ordered(jnp.where(own_W, groups.rows_W, 0)),
        used=jnp.broadcast_to(total, groups.used.shape),
        token_P=token_P,
        place_TK=moved_W[old_TK] * tile + groups.place_TK % tile,
        own_TK=own_W[old_TK],
    )


def combine(y_PD: Array, groups: Groups, weight_TK: Array) -> Array:
    """Each token's rows times its weights (float32), summed in float32; `[T, D]` in y's dtype."""
    return rows_for(y_PD, groups, weight_TK).whole


def rows_for(y_PD: Array, groups: Groups, weight_TK: Array) -> WeightedRows:
    """What `combine` adds up, for an op that does so itself."""
    return WeightedRows(y_PD, groups.place_TK, weight_TK, groups.own_TK)
