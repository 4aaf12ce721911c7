"""Work list of one extend step: which query tiles exist, computed on device from the ragged rows.

Tokens of the step are cut into spans: every row's chunk, and every gap that no row uses (its tokens get zeros). Each span is cut into
tiles of `queries` tokens. A tile at the end of the array is moved back so that it lies inside; its item says which of its tokens are its
own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ExtendPlan(NamedTuple):
    """One array the kernel reads as scalars, int32; longest items first. One plan serves all layers of a step.

    items_I6: (first token of the tile, first own token, end of own tokens, row, sequence position of the tile's first token, number of
    keys the last own query sees). No keys: the tokens get zeros. No own tokens: nothing to do.
    """

    items_I6: jax.Array


def make_plan(starts_R: jax.Array, lengths_R: jax.Array, kv_lengths_R: jax.Array, *, tokens: int, queries: int) -> ExtendPlan:
    """The items for `tokens` tokens (at least `queries`) in R rows that do not overlap; lengths 0 are rows not in use."""
    R = starts_R.shape[0]
    starts_R, lengths_R, kv_lengths_R = (a.astype(jnp.int32) for a in (starts_R, lengths_R, kv_lengths_R))
    live_R = lengths_R > 0
    row_R = jnp.arange(R, dtype=jnp.int32)

    def next_start(token: jax.Array) -> jax.Array:
        """Start of the first live row at or after each token, or the end of the array."""
        after = live_R & (starts_R >= token[:, None])
        return jnp.min(jnp.where(after, starts_R, tokens), axis=1, initial=tokens)

    ends_R = starts_R + lengths_R
    gap_starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.where(live_R, ends_R, tokens)])
    gap_ends = next_start(gap_starts)
    none = jnp.zeros((R + 1,), jnp.int32)
    # Spans: (first token, end, row, position of the first token, keys).
    begin_S = jnp.concatenate([starts_R, gap_starts])
    end_S = jnp.concatenate([ends_R, gap_ends])
    row_S = jnp.concatenate([row_R, none])
    position_S = jnp.concatenate([kv_lengths_R - lengths_R, none])
    live_S = jnp.concatenate([live_R, jnp.zeros((R + 1,), bool)])
    tiles_S = (end_S - begin_S + (queries - 1)) // queries
    span_S = jnp.arange(2 * R + 1)
    before_S = jnp.sum(jnp.where(span_S[None, :] < span_S[:, None], tiles_S[None, :], 0), axis=1)

    item_I = jnp.arange(-(-tokens // queries) + 2 * R + 1, dtype=jnp.int32)
    mine_IS = (item_I[:, None] >= before_S) & (item_I[:, None] < before_S + tiles_S)

    def pick(values_S: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine_IS, values_S, 0), axis=1)

    begin, end, live = pick(begin_S), pick(end_S), pick(live_S.astype(jnp.int32)) > 0
    low = begin + (item_I - pick(before_S)) * queries
    high = jnp.minimum(low + queries, end)
    at = jnp.clip(low, 0, tokens - queries)
    position = pick(position_S) + at - begin
    keys = jnp.where(live, position + high - at, 0)
    used = mine_IS.any(axis=1)
    items = jnp.where(used[:, None], jnp.stack([at, low, high, pick(row_S), position, keys], axis=1), 0)
    # Longest first, so that no long item starts last: rank by comparison, ties by index.
    longer = (keys[None, :] > keys[:, None]) | ((keys[None, :] == keys[:, None]) & (item_I[None, :] < item_I[:, None]))
    rank = jnp.sum(longer.astype(jnp.int32), axis=1)
    chosen = rank[None, :] == item_I[:, None]
    return ExtendPlan(jnp.sum(jnp.where(chosen[:, :, None], items[None], 0), axis=1))
