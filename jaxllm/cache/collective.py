"""What the devices that share a model's layers give each other inside a forward.

A forward runs on every device over its own arrays (`jaxllm.mesh.per_device`). Where a linear map's
inputs are split, its product is this device's part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.mesh import LAYER, layer_devices
from pallas_kernels import add_norm, all_reduce
from pallas_kernels.all_reduce import Axes, Group, Inbox, Layout
from pallas_kernels.grouped_matmul import Groups, own_groups
from pallas_kernels.parts import Product, whole
from pallas_kernels.scaled_matmul import Inputs, Rounding
from pallas_kernels.target import Target

WIDTH, EXPERT = LAYER

type Pick = Callable[[Array], Array]


class Collective(Protocol):
    """The devices of one forward. All of them call the same methods in the same order, and hold the
    same bits afterwards."""

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        target: Target,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        """`x` plus the sum of all parts, and its norm, rounded if that is asked for; the
        kernel is chosen for `target`."""

    def sum(self, part: Product) -> Array:
        """The sum of all parts."""

    def once(self, x: Array) -> Array:
        """Parts whose sum is `x`, which is the same on all devices."""

    def own(self, x: Array, axis: int) -> Array:
        """This device's share of `x` along an axis."""

    def placed(self, x_TI: Array, count: int) -> Array:
        """`[T, count]`: this device's share of so many columns, zeros where the others' are."""

    def rows(self, pick: Pick, index: Array, held: int, count: int) -> Array:
        """Rows of a table of `count` rows, of which each device has all or its share, `held`;
        `pick` gives this device's of the places among these."""

    def experts(self, groups: Groups, count: int) -> Groups:
        """The rows of this device's share of `count` experts."""

    @property
    def of_expert(self) -> Collective:
        """The devices that share each of this device's experts."""


class Alone:
    """One device has everything: parts are whole."""

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        target: Target,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        backend = add_norm.find(target, x_TD, weight_D, part_TD, rounding)
        if backend is None:
            part_TD = whole(part_TD)
            backend = add_norm.choose(target, x_TD, weight_D, rounding=rounding)
        return _add_norm(x_TD, part_TD, weight_D, eps, rounding=rounding, backend=backend)

    def sum(self, part: Product) -> Array:
        return whole(part)

    def once(self, x: Array) -> Array:
        return x

    def own(self, x: Array, axis: int) -> Array:
        return x

    def placed(self, x_TI: Array, count: int) -> Array:
        return x_TI

    def rows(self, pick: Pick, index: Array, held: int, count: int) -> Array:
        return pick(index)

    def experts(self, groups: Groups, count: int) -> Groups:
        return groups

    @property
    def of_expert(self) -> Collective:
        return self


@dataclass(frozen=True)
class AllReduce:
    """Sums over the devices of a group: by their inboxes where it has some and their kernel takes
    the arrays, else by XLA.

    Attributes:
        expert_groups: parts of the group that have experts of their own.
    """

    group: Group
    expert_groups: int = 1

    def add_norm(
        self,
        x_TD: Array,
        part_TD: Product,
        weight_D: Array,
        eps: float,
        target: Target,
        rounding: Rounding | None = None,
    ) -> tuple[Array, Inputs]:
        part_TD = whole(part_TD)
        summing = self._backend(part_TD)
        if part_TD.dtype == x_TD.dtype and all_reduce.by_inboxes(summing):
            return _peers_add_norm(
                x_TD, part_TD, weight_D, eps, rounding=rounding, group=self.group, backend=summing
            )
        backend = add_norm.choose(target, x_TD, weight_D, rounding=rounding)
        how = {"rounding": rounding, "axis": self.group.axis, "backend": backend}
        return _sum_add_norm(x_TD, part_TD, weight_D, eps, **how)

    def sum(self, part: Product) -> Array:
        part = whole(part)
        return _sum(part, group=self.group, backend=self._backend(part))

    def once(self, x: Array) -> Array:
        return jnp.where(lax.axis_index(self.group.axis) == 0, x, jnp.zeros_like(x))

    def own(self, x: Array, axis: int) -> Array:
        share = x.shape[axis] // self.group.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.group.axis) * share, share, axis)

    def placed(self, x_TI: Array, count: int) -> Array:
        whole = jnp.zeros((x_TI.shape[0], count), x_TI.dtype)
        first = lax.axis_index(self.group.axis) * x_TI.shape[1]
        return lax.dynamic_update_slice_in_dim(whole, x_TI, first, axis=1)

    def rows(self, pick: Pick, index: Array, held: int, count: int) -> Array:
        if held == count:
            return pick(index)
        place = index - lax.axis_index(self.group.axis) * held
        found = pick(jnp.clip(place, 0, held - 1))
        mine = ((place >= 0) & (place < held)).reshape(-1, *(1,) * (found.ndim - 1))
        return self.sum(jnp.where(mine, found, jnp.zeros_like(found)))

    def experts(self, groups: Groups, count: int) -> Groups:
        if self.expert_groups == 1:
            return groups
        share = -(-count // self.expert_groups)  # the last may have fewer
        return own_groups(groups, lax.axis_index(EXPERT) * share, share)

    @property
    def of_expert(self) -> Collective:
        devices = self.group.devices // self.expert_groups
        if devices == 1:
            return ALONE
        return AllReduce(Group(WIDTH, devices))

    def _backend(self, part: Array) -> str:
        """What adds up parts like this one."""
        if part.ndim != 2:
            return all_reduce.portable_backend()
        return all_reduce.choose(self.group, part)


ALONE = Alone()


def over(mesh: Mesh, layout: Layout | None = None, peers: tuple[Array, ...] = ()) -> Collective:
    """The collective of a mesh's devices; `peers` are one device's part of `Inboxes.arrays`."""
    if mesh.size == 1:
        return ALONE
    return AllReduce(group_of(mesh, layout, peers), mesh.shape[EXPERT])


def group_of(mesh: Mesh, layout: Layout | None = None, peers: tuple[Array, ...] = ()) -> Group:
    """The devices that share the layers, with their inboxes if they have some."""
    inbox = None if layout is None or not peers else Inbox(peers[0], peers[1], layout)
    return Group(LAYER, layer_devices(mesh), inbox)


def _summed(
    x_TD: Array,
    part_TD: Array,
    weight_D: Array,
    eps: float,
    *,
    rounding: Rounding | None,
    axis: Axes,
    backend: str,
) -> tuple[Array, Inputs]:
    delta_TD = lax.psum(part_TD, axis)
    return add_norm.add_norm(x_TD, delta_TD, weight_D, eps, rounding=rounding, backend=backend)


# Jitted, so that a kernel is lowered once, not for every layer.
_add_norm = jax.jit(add_norm.add_norm, static_argnames=("eps", "rounding", "backend"))
_peers_add_norm = jax.jit(all_reduce.add_norm, static_argnames=("eps", "rounding", "backend"))
_sum = jax.jit(all_reduce.all_reduce, static_argnames=("backend",))
_sum_add_norm = jax.jit(_summed, static_argnames=("eps", "rounding", "axis", "backend"))
