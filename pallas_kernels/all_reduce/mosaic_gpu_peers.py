"""Sums over the devices of one process for NVIDIA Hopper: one launch, a warpgroup a row.

Each device stores its part of a row into the inboxes of the others, by their addresses. To XLA that
is a plain kernel, which it records in a CUDA graph. `protocol` has the exchange and why it is safe.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.mosaic_norm import norm_of, norm_results, store_norm
from pallas_kernels.all_reduce.group import LANES, Group, Inbox
from pallas_kernels.all_reduce.mosaic_exchange import Row, open_place, put, take
from pallas_kernels.all_reduce.plan import GATHER_ROW, MOST_DEVICES, is_one_shot
from pallas_kernels.all_reduce.protocol import Region
from pallas_kernels.mosaic_gpu import launch, row_layout, store
from pallas_kernels.scaled_matmul import Inputs, Rounding

MAX_WIDTH = 64 * LANES  # elements of a row in registers
WORDS_AT_ONCE = 64  # registers of a thread that polling fills


def check(group: Group, part_TD: Array) -> None:
    """Raise ValueError for a group, a shape or a type that the kernel does not support."""
    if group.inbox is None:
        raise ValueError("mosaic_gpu_peers all_reduce takes a group with inboxes")
    rows, width = part_TD.shape
    if part_TD.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"mosaic_gpu_peers all_reduce takes bfloat16 or float16, got {part_TD.dtype}"
        )
    if width % (2 * LANES) or not width <= MAX_WIDTH:
        raise ValueError(
            f"mosaic_gpu_peers all_reduce takes a width that is a multiple of {2 * LANES} "
            f"up to {MAX_WIDTH}, got {width}"
        )
    if not 2 <= group.devices <= MOST_DEVICES:
        raise ValueError(
            f"mosaic_gpu_peers all_reduce takes 2 to {MOST_DEVICES} devices, got {group.devices}"
        )
    layout = group.inbox.layout
    size = width * part_TD.dtype.itemsize
    if is_one_shot(group.devices, rows * size):
        most = layout.one_shot
    else:
        most = layout.two_shot
    if size > layout.row or not 1 <= rows <= most:
        raise ValueError(
            f"the inboxes of this all_reduce take 1 to {most} rows of at most {layout.row} bytes, "
            f"got {rows} rows of {size}"
        )


def add_norm(
    x_TD: Array,
    part_TD: Array,
    weight_D: Array,
    eps: float,
    group: Group,
    rounding: Rounding | None = None,
) -> tuple[Array, Inputs]:
    """See `pallas_kernels.all_reduce`: bfloat16 or float16, weights also float32. Raises ValueError
    for what the kernel does not take."""
    check(group, part_TD)
    if x_TD.shape != part_TD.shape or x_TD.dtype != part_TD.dtype:
        raise ValueError(
            "mosaic_gpu_peers all_reduce takes x and part of one shape and type, got "
            f"{x_TD.dtype}{list(x_TD.shape)} and {part_TD.dtype}{list(part_TD.shape)}"
        )
    D = part_TD.shape[1]
    layout = row_layout(D, part_TD.dtype)

    def add_norm_kernel(x_ref, part_ref, weight_ref, words_ref, table_ref, sum_ref, *norm_refs):  # type: ignore[no-untyped-def]
        t = lax.axis_index("row")
        weight = _load(weight_ref, layout).astype(jnp.float32)
        refs = part_ref.at[t], words_ref, table_ref, x_ref.at[t]
        total = _sum(group, part_TD.shape[0], layout, refs)
        store(sum_ref.at[t], total)
        store_norm(total, weight, eps, t, norm_refs)

    shape = jax.ShapeDtypeStruct(part_TD.shape, part_TD.dtype)
    shapes = (shape, *norm_results(x_TD, rounding))
    total, *norm = _launch(add_norm_kernel, (x_TD, part_TD, weight_D), group, shapes)
    return total, norm_of(x_TD, norm)


def all_reduce(part_TD: Array, group: Group) -> Array:
    """See `pallas_kernels.all_reduce`: bfloat16 or float16. Raises ValueError for what the kernel
    does not take."""
    check(group, part_TD)
    layout = row_layout(part_TD.shape[1], part_TD.dtype)

    def all_reduce_kernel(part_ref, words_ref, table_ref, sum_ref):  # type: ignore[no-untyped-def]
        t = lax.axis_index("row")
        refs = part_ref.at[t], words_ref, table_ref, None
        store(sum_ref.at[t], _sum(group, part_TD.shape[0], layout, refs))

    shape = jax.ShapeDtypeStruct(part_TD.shape, part_TD.dtype)
    return _launch(all_reduce_kernel, (part_TD,), group, shape)


def gather(x: Array, group: Group) -> Array:
    """See `pallas_kernels.all_reduce`: 32-bit numbers, at most as many as the inboxes take."""
    inbox = _inbox(group)
    X = group.devices
    W = GATHER_ROW // 4
    rows = -(-x.size // W)
    if x.dtype.itemsize != 4 or not 1 <= rows <= inbox.layout.one_shot:
        raise ValueError(
            "mosaic_gpu_peers gather takes 32-bit numbers, "
            f"at most {inbox.layout.one_shot * W}, got {x.dtype}{list(x.shape)}"
        )
    layout = row_layout(W, jnp.int32)
    if x.dtype == jnp.int32:
        words = x
    else:
        words = lax.bitcast_convert_type(x, jnp.int32)
    padded_words = jnp.pad(words.reshape(-1), (0, rows * W - x.size)).reshape(rows, W)

    def gather_kernel(x_ref, words_ref, table_ref, out_ref):  # type: ignore[no-untyped-def]
        t = lax.axis_index("row")
        part = _load(x_ref.at[t], layout)
        row, region = _send(group, part, layout, words_ref, table_ref)
        if X == 2:
            (peer_part,) = take((W,), jnp.int32, layout, row, region, [0])
            store(out_ref.at[table_ref[0], t], part)
            store(out_ref.at[1 - table_ref[0], t], peer_part)
        else:
            for slots in _at_once(X, 2):
                for d, peer_part in zip(
                    slots, take((W,), jnp.int32, layout, row, region, slots), strict=True
                ):
                    store(out_ref.at[d, t], peer_part)

    shape = jax.ShapeDtypeStruct((X, rows, W), jnp.int32)
    device_words = _launch(gather_kernel, (padded_words,), group, shape)
    out = device_words.reshape(X, rows * W)[:, : x.size].reshape(X, *x.shape)
    if x.dtype == jnp.int32:
        return out
    return lax.bitcast_convert_type(out, x.dtype)


def _sum(group: Group, rows: int, layout: Any, refs: tuple[Any, Any, Any, Any]) -> Array:
    """The sum of the parts of this block's row, and of x if there is one, rounded once."""
    part_ref, words_ref, table_ref, x_ref = refs
    part = _load(part_ref, layout)
    (width,) = part.shape
    if is_one_shot(group.devices, rows * width * part.dtype.itemsize):
        row, region = _send(group, part, layout, words_ref, table_ref)
        return _added(group, part, layout, (row, region), x_ref)
    return _two_shot(group, part, layout, (words_ref, table_ref, x_ref))


def _send(
    group: Group, x: Array, layout: Any, words_ref: Any, table_ref: Any
) -> tuple[Row, Region]:
    """Send a row to every other device, and to this one where it has a slot for itself."""
    sizes = _inbox(group).layout
    t = lax.axis_index("row")
    place = open_place(words_ref, t, sizes.header, sizes.one_shot_record)
    row = Row(words_ref, table_ref, t, place)
    region = Region.one_shot(sizes)
    for i in range(1, group.devices):
        put(x, layout, row, region, i)
    if sizes.slots > 1:
        put(x, layout, row, region, 0)
    return row, region


def _added(group: Group, part: Array, layout: Any, source: tuple[Row, Region], x_ref: Any) -> Array:
    """The parts that come, in the order of their devices, so that all get the same bits. Two
    devices need no order."""
    x = None
    if x_ref is not None:
        x = _load(x_ref, layout)
    take_some = functools.partial(take, part.shape, part.dtype, layout, *source)
    total: Any = part.astype(jnp.float32) if group.devices == 2 else None
    words = part.shape[0] * part.dtype.itemsize // (4 * LANES)
    for slots in [[0]] if group.devices == 2 else _at_once(group.devices, words):
        for peer_part in take_some(slots):
            wide = peer_part.astype(jnp.float32)
            if total is None:
                total = wide
            else:
                total = total + wide
    if x is not None:
        total = x.astype(jnp.float32) + total
    return total.astype(part.dtype)


def _two_shot(group: Group, part: Array, layout: Any, refs: tuple[Any, Any, Any]) -> Array:
    """The row's owner adds it up and sends the sum to everyone, itself included."""
    words_ref, table_ref, x_ref = refs
    sizes = _inbox(group).layout
    X = group.devices
    t = lax.axis_index("row")
    place = open_place(words_ref, t, sizes.totals, sizes.total_record)
    whole = Row(words_ref, table_ref, t, place)
    share = whole._replace(number=lax.div(t, jnp.int32(X)))
    owner = lax.rem(lax.rem(t, jnp.int32(X)) - table_ref[0] + X, jnp.int32(X))
    put(part, layout, share, Region.parts(sizes), owner)

    @pl.when(owner == 0)
    def _():  # type: ignore[no-untyped-def]
        total = _added(group, part, layout, (share, Region.parts(sizes)), x_ref)
        for i in (*range(1, X), 0):
            put(total, layout, whole, Region.totals(sizes), i)

    (total,) = take(part.shape, part.dtype, layout, whole, Region.totals(sizes), [0])
    return total


def _at_once(devices: int, words: int) -> list[list[int]]:
    """The slots of all devices, as many at once as a thread has registers for."""
    batch = max(1, WORDS_AT_ONCE // words)
    return [list(range(i, min(i + batch, devices))) for i in range(0, devices, batch)]


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _inbox(group: Group) -> Inbox:
    if group.inbox is None:
        raise ValueError("mosaic_gpu_peers all_reduce takes a group with inboxes")
    return group.inbox


def _launch(kernel: Any, operands: tuple[Array, ...], group: Group, out_type: Any) -> Any:
    """One block a row of the last of `operands` that has rows. The inbox and the table follow."""
    inbox = _inbox(group)
    return launch(
        kernel,
        (*operands, inbox.words, inbox.table),
        None,
        out_type=out_type,
        grid=(operands[0].shape[0],),
        grid_names=("row",),
        # No thread reads what another one of its device stores
        compiler={"unsafe_no_auto_barriers": True},
    )
