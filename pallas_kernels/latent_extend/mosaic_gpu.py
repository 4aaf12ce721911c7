"""Latent attention of prompt chunks for NVIDIA Hopper, by the kernels of other ops.

Rows with the shortest contexts are expanded: keys and values of all heads are made of their
latents, a page of them for each page of latents, and `paged_extend` attends. There is room for a
fixed number of pages, so rows that no longer fit are absorbed: each token is a row of
`latent_decode`. Each kernel leaves zeros for the other's tokens. Long steps absorb in a loop, which
ends at once where all rows are expanded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.backends import AttentionOptions, close_plan
from pallas_kernels.latent_decode import mosaic_gpu as decode
from pallas_kernels.latent_decode.rows import UpProjections, absorbed, projected
from pallas_kernels.latent_extend.reference import token_rows
from pallas_kernels.paged_decode.plan import DecodePlan
from pallas_kernels.paged_extend import mosaic_gpu as extend
from pallas_kernels.paged_extend.plan import ExtendPlan

WIDEST = 256  # heads that `paged_extend` takes
ROOM = 2  # tokens that are expanded at most, a token of the step
PLENTY = 16384  # tokens of room beyond which rows get no page more for their last ones
SLAB = 2048  # tokens absorbed at once: more rows would count more tiles than int32 can divide
UNASKED = 512  # tokens up to which absorbing nothing costs less than the host's look at a loop


class Expanded(NamedTuple):
    """Rows whose latents are expanded.

    Attributes:
        page_E: The page of latents that each expanded page is made of.
        table_RM, lengths_R, kv_lengths_R: Of the rows, in expanded pages; length 0 for others.
        work: How the kernel divides them.
    """

    page_E: Array
    table_RM: Array
    lengths_R: Array
    kv_lengths_R: Array
    work: ExtendPlan


class Absorbed(NamedTuple):
    """Slabs of tokens that are rows of decode; of one slab without the axis S.

    Attributes:
        first_S: The first token of each. The last slab begins earlier where tokens do not divide.
        table_STM, seen_ST: Page tables, and tokens that are seen; 0 for tokens of other rows or of
            the slab before.
        work: How the kernel divides them.
    """

    first_S: Array
    table_STM: Array
    seen_ST: Array
    work: DecodePlan


class Plan(NamedTuple):
    """What all layers of a step share. `expanded` is None where rows do not depend on others;
    `bounds` are the first slab with tokens to absorb, and the one after the last."""

    expanded: Expanded | None
    absorbed: Absorbed
    bounds: Array


def plan(
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    tokens: int,
    heads: int,
    widths: tuple[int, int],
    page_size: int,
    no_split: bool = False,
    tuning: extend.Tuning | None = None,
) -> Plan:
    """The plan of one step over `tokens` tokens. `heads` are those of one device, `widths` are
    those of their keys and values.

    With `no_split` a row's result does not depend on the others: all are absorbed.
    """
    pages_R = jnp.where(lengths_R > 0, -(-kv_lengths_R // page_size), 0).astype(jnp.int32)
    room = room_of(tokens, lengths_R.shape[0], page_size)
    fits_R = _shortest(pages_R, room)
    if no_split or max(widths) > WIDEST:
        fits_R = jnp.zeros_like(fits_R)
        expanded = None
    else:
        lengths = (jnp.where(fits_R, lengths_R, 0), jnp.where(fits_R, kv_lengths_R, 0))
        work = extend.plan(
            starts_R,
            *lengths,
            tokens=tokens,
            heads=heads,
            kv_heads=heads,
            head_dim=extend.stored(*widths)[0],
            no_split=no_split,
            tuning=tuning,
        )
        own_R = jnp.where(fits_R, pages_R, 0)
        expanded = Expanded(*_pages(page_table_RM, own_R, room), *lengths, work)
    table_TM, seen_T = token_rows(
        page_table_RM, starts_R, jnp.where(fits_R, 0, lengths_R), kv_lengths_R, tokens
    )
    slabs = _slabs(table_TM, seen_T, heads, no_split)
    return Plan(expanded, slabs, _bounds(jnp.any(slabs.seen_ST > 0, axis=1)))


def room_of(tokens: int, rows: int, page_size: int) -> int:
    """Pages that are expanded in every layer of a step, whether rows have them or not."""
    pages = -(-ROOM * tokens // page_size)
    return max(pages, min(pages + rows, PLENTY // page_size))


def _slabs(table_TM: Array, seen_T: Array, heads: int, no_split: bool) -> Absorbed:
    """All tokens, in slabs of equal size."""
    tokens = seen_T.shape[0]
    count = -(-tokens // SLAB)
    size = -(-tokens // count)
    slabs = []
    for begin in range(0, count * size, size):
        first = min(begin, tokens - size)
        new_T = jnp.arange(first, first + size) >= begin
        seen = jnp.where(new_T, seen_T[first : first + size], 0)
        work = decode.plan(seen, heads=heads, no_split=no_split)
        slabs.append(Absorbed(jnp.int32(first), table_TM[first : first + size], seen, work))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *slabs)


def _bounds(some_S: Array) -> Array:
    """The first slab of `some_S`, and the one after the last."""
    index_S = jnp.arange(some_S.shape[0], dtype=jnp.int32)
    end = jnp.max(jnp.where(some_S, index_S + 1, 0))
    return jnp.stack([jnp.min(jnp.where(some_S, index_S, end)), end])


def _shortest(pages_R: Array, room: int) -> Array:
    """The rows with the fewest pages whose sum is at most `room`."""
    row_R = jnp.arange(pages_R.shape[0])
    equal = (pages_R == pages_R[:, None]) & (row_R <= row_R[:, None])
    before = (pages_R < pages_R[:, None]) | equal
    return jnp.sum(jnp.where(before, pages_R, 0), axis=1) <= room


def _pages(page_table_RM: Array, pages_R: Array, room: int) -> tuple[Array, Array]:
    """The pages of latents, one row's after another's, and the rows' tables into them."""
    index_E = jnp.arange(room, dtype=jnp.int32)
    end_R = jnp.cumsum(pages_R)
    first_R = end_R - pages_R
    row_E = jnp.minimum(jnp.sum(end_R <= index_E[:, None], axis=1), pages_R.shape[0] - 1)
    within_E = jnp.minimum(index_E - first_R[row_E], page_table_RM.shape[1] - 1)
    width = min(room, page_table_RM.shape[1])
    table_RM = jnp.minimum(first_R[:, None] + jnp.arange(width, dtype=jnp.int32), room - 1)
    return page_table_RM[row_E, within_E], table_RM


def check(q: Array, pages: Array, value_dim: int) -> None:
    """Raise ValueError for shapes and types that the kernels do not take."""
    decode.check(q, pages, value_dim)


def latent_extend(
    q_TNH: Array,
    up: UpProjections,
    pages_PCW: Array,
    page_table_RM: Array,
    starts_R: Array,
    lengths_R: Array,
    kv_lengths_R: Array,
    *,
    tuning: extend.Tuning | None = None,
    interpret: Any = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """See `pallas_kernels.latent_extend`. The option `plan` is this module's `plan(...)`.

    Takes what `latent_decode` takes; heads of up to 256 are expanded, wider ones always absorbed.
    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    T, N, H = q_TNH.shape
    F = up.values_NFV.shape[1]
    planned = options.get("plan") or plan(
        page_table_RM,
        starts_R,
        lengths_R,
        kv_lengths_R,
        tokens=T,
        heads=N,
        widths=(H, F),
        page_size=pages_PCW.shape[1],
        no_split=options.get("no_split", False),
        tuning=tuning,
    )
    first_page = options.get("first_page")
    o_TNF = jnp.zeros((*q_TNH.shape[:2], F), q_TNH.dtype)
    if planned.expanded is not None:
        rows = planned.expanded
        pools = _expanded(pages_PCW, rows.page_E, first_page, up)
        o_TNF = extend.extend_attention(
            _padded(q_TNH, pools[0].shape[-1]),
            *pools,
            rows.table_RM,
            starts_R,
            rows.lengths_R,
            rows.kv_lengths_R,
            tuning=tuning,
            tokens_first=True,
            interpret=interpret,
            scale=options["scale"],
            plan=rows.work,
        )[..., :F]
    run = functools.partial(
        _attend_absorbed,
        up=up,
        pages_PCW=pages_PCW,
        interpret=interpret,
        scale=options["scale"],
        first_page=first_page,
        no_split=options.get("no_split", False),
    )
    slabs = close_plan(planned.absorbed)

    def add(index: Array, o_TNF: Array) -> Array:
        slab = jax.tree.map(lambda leaf: leaf[index], slabs)
        return _with_rows(o_TNF, slab, run(_rows(q_TNH, slab), slab))

    if T <= UNASKED:
        return add(jnp.int32(0), o_TNF)
    return lax.fori_loop(*planned.bounds, add, o_TNF)


def _rows(x_TNH: Array, slab: Absorbed) -> Array:
    return lax.dynamic_slice_in_dim(x_TNH, slab.first_S, slab.seen_ST.shape[0])


def _with_rows(x_TNH: Array, slab: Absorbed, more: Array) -> Array:
    """With `more` added to the slab's rows."""
    added = _rows(x_TNH, slab) + more
    return lax.dynamic_update_slice_in_dim(x_TNH, added, slab.first_S, 0)


def _attend_absorbed(
    q_TNH: Array, slab: Absorbed, *, up: UpProjections, pages_PCW: Array, **options: Any
) -> Array:
    """Outputs of a slab's tokens, zeros for those of expanded rows."""
    rank = up.keys_NEV.shape[-1]
    rows = (slab.table_STM, slab.seen_ST)
    q_TNW = absorbed(q_TNH, up)
    o_TNV = decode.latent_decode(q_TNW, pages_PCW, *rows, value_dim=rank, plan=slab.work, **options)
    return projected(o_TNV, up)


def _expanded(
    pages_PCW: Array, page_E: Array, first_page: Array | None, up: UpProjections
) -> tuple[Array, Array]:
    """Keys and values of all heads `[E, C, N, H]`, as products leave them. Each key has the turned
    part that heads share, and zeros up to a width that the kernel takes, as values have."""
    page_E = page_E if first_page is None else page_E + first_page
    rank = up.keys_NEV.shape[-1]
    entry_ECW = pages_PCW.at[page_E].get(mode="clip")
    latent_ECV = entry_ECW[..., :rank]
    turned_ECR = entry_ECW[..., rank:]
    k_ECNH = jnp.einsum("ecv,nhv->ecnh", latent_ECV, up.keys_NEV)
    v_ECNF = jnp.einsum("ecv,nfv->ecnf", latent_ECV, up.values_NFV)
    shared = jnp.broadcast_to(turned_ECR[:, :, None], (*k_ECNH.shape[:-1], turned_ECR.shape[-1]))
    keys = jnp.concatenate([k_ECNH, shared], axis=-1)
    widths = extend.stored(keys.shape[-1], v_ECNF.shape[-1])
    return _padded(keys, widths[0]), _padded(v_ECNF, widths[1])


def _padded(x: Array, width: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
