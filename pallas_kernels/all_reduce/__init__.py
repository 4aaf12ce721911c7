"""Sums over devices inside a `shard_map`, with the residual sum and norm that follow them, and the
small exchange of greedy draws."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.all_reduce.group import Axes as Axes
from pallas_kernels.all_reduce.group import Group as Group
from pallas_kernels.all_reduce.group import Inbox as Inbox
from pallas_kernels.all_reduce.group import Layout as Layout
from pallas_kernels.backends import Backends
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import ANYWHERE, PORTABLE, Needs

# The inboxes' back end serves groups that have inboxes. Only devices have some on which its kernels
# run and a trial went well, see `trial.refusal`
TRIED = Needs("GPUs that store into each other's memory")
NEEDS = {"reference": ANYWHERE, "mosaic_gpu_peers": TRIED}
ADD_NORM = Backends(__name__, "add_norm", NEEDS)
ALL_REDUCE = Backends(__name__, "all_reduce", NEEDS)
GATHER = Backends(__name__, "gather", NEEDS)


def add_norm(
    x_TD: Array,
    part_TD: Array,
    weight_D: Array,
    eps: float,
    *,
    rounding: Rounding | None = None,
    group: Group,
    backend: str,
) -> tuple[Array, Inputs]:
    """`(x + sum over devices of part, its RMS norm * weight)`, both `[T, D]` in x's dtype.

    With a `rounding` the norm is rounded, as of `pallas_kernels.add_norm`.
    `x` and `weight` are equal on all devices, and so are the bits of the results. Raises
    `UnknownBackend` for a name not in `ADD_NORM`.
    """
    return ADD_NORM[backend](x_TD, part_TD, weight_D, eps, group, rounding)


def all_reduce(part_TD: Array, *, group: Group, backend: str) -> Array:
    """The sum over devices of `part`, with the same bits on all of them."""
    return ALL_REDUCE[backend](part_TD, group)


def gather(x: Array, *, group: Group, backend: str) -> Array:
    """`[X, *x.shape]`: the `x` of each device in their order. Meant for small arrays of 32 bits."""
    return GATHER[backend](x, group)


def largest(value_B: Array, index_B: Array, *, group: Group, backend: str) -> tuple[Array, Array]:
    """Of each row the largest value over devices (float32) and its index (int32, not negative).

    Of equal values the one with the least index is taken; NaN is larger than any other value, as in
    `jnp.argmax`.
    """
    pair_B2 = jnp.stack([lax.bitcast_convert_type(value_B, jnp.int32), index_B], axis=1)
    pair_XB2 = gather(pair_B2, group=group, backend=backend)
    value_XB = lax.bitcast_convert_type(pair_XB2[:, :, 0], jnp.float32)
    broken_B = jnp.isnan(value_XB).any(axis=0)  # XLA's maximum on the CPU may lose NaN
    top_B = jnp.where(broken_B, jnp.nan, jnp.max(value_XB, axis=0))
    wins_XB = (value_XB == top_B) | jnp.isnan(value_XB)
    index_B = jnp.min(jnp.where(wins_XB, pair_XB2[:, :, 1], jnp.iinfo(jnp.int32).max), axis=0)
    return top_B, index_B


def choose(group: Group, part_TD: Array) -> str:
    """The back end of sums of such parts over a group."""
    return ALL_REDUCE.choose(PORTABLE, group, part_TD)


def by_inboxes(backend: str) -> bool:
    """Whether a back end sums through inboxes, which the group then has."""
    return not ALL_REDUCE.runs_anywhere(backend)


def inbox_backend() -> str:
    """The back end that sums through inboxes."""
    return next(name for name in ALL_REDUCE if not ALL_REDUCE.runs_anywhere(name))


def portable_backend() -> str:
    """The back end that sums by XLA's collectives."""
    return next(name for name in ALL_REDUCE if ALL_REDUCE.runs_anywhere(name))


def gather_backend(group: Group) -> str:
    """The back end of `gather` and `largest` over a group."""
    if group.inbox is None:
        return portable_backend()
    return inbox_backend()
