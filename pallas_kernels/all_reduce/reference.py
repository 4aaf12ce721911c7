"""Sums over devices by XLA's collectives, inside a `shard_map`."""

from __future__ import annotations

from jax import Array, lax

from pallas_kernels.add_norm.reference import add_norm as add_norm_of_one
from pallas_kernels.all_reduce.group import Group
from pallas_kernels.scaled_matmul import Inputs, Rounding


def add_norm(
    x_TD: Array,
    part_TD: Array,
    weight_D: Array,
    eps: float,
    group: Group,
    rounding: Rounding | None = None,
) -> tuple[Array, Inputs]:
    """See `pallas_kernels.all_reduce`."""
    delta_TD = all_reduce(part_TD, group).astype(x_TD.dtype)
    return add_norm_of_one(x_TD, delta_TD, weight_D, eps, rounding)


def all_reduce(part_TD: Array, group: Group) -> Array:
    """See `pallas_kernels.all_reduce`."""
    return lax.psum(part_TD, group.axis)


def gather(x: Array, group: Group) -> Array:
    """See `pallas_kernels.all_reduce`."""
    return lax.all_gather(x, group.axis)
