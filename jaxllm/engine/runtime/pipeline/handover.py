"""Arrays from the devices of one process to those of another."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.engine.runtime.compilation.xla_options import APART
from jaxllm.mesh import LAYER

# Axes of the devices of both stages
STAGE = "stage"
DEVICE = "device"


class Handover:
    """Takes matrices [T, D] from a stage on these `source` devices to the next one on those of
    `target`, which another process has. Either is whole on every device.

    Both processes run the same program over the devices of both: one sends, the other receives, as
    often and in the same order. Where D divides, each device carries its share over, and those that
    receive give each other theirs.
    """

    def __init__(self, source: Mesh, target: Mesh, width: int):
        devices = np.stack([source.devices.ravel(), target.devices.ravel()])
        both = Mesh(devices, (STAGE, DEVICE), axis_types=(AxisType.Auto,) * 2)
        count = target.size
        self._shared = count > 1 and width % count == 0
        given = PartitionSpec(STAGE)
        made = PartitionSpec(STAGE, DEVICE if self._shared else None)
        self._given = NamedSharding(both, given)
        self._parts = NamedSharding(target, PartitionSpec(None, LAYER if self._shared else None))
        whole = NamedSharding(target, PartitionSpec())
        carry = partial(_carry, width // count if self._shared else width)
        carry = jax.shard_map(carry, mesh=both, in_specs=given, out_specs=made, check_vma=False)
        jit = partial(jax.jit, compiler_options=dict(APART))
        self._carry = jit(carry)
        self._gather = jit(lambda parts: parts, out_shardings=whole)
        self._zeros = jit(jnp.zeros, static_argnums=(0, 1), out_shardings=whole)
        self._blank: Array | None = None

    def send(self, array: Array) -> None:
        """Hand a matrix of the source's devices to whoever receives."""
        self._run(array)

    def receive(self, like: jax.ShapeDtypeStruct) -> Array:
        """The matrix of this shape and type that the other process sends."""
        blank = self._blank
        if blank is None or (blank.shape, blank.dtype) != (like.shape, like.dtype):
            # Of one size alone: that of steady decode is small, those of prompts take much memory
            blank = self._blank = self._zeros(like.shape, like.dtype)
        own = [shard.data for shard in self._run(blank).addressable_shards]
        parts = jax.make_array_from_single_device_arrays(like.shape, self._parts, own)
        if self._shared:
            return self._gather(parts)
        return parts

    def _run(self, array: Array) -> Array:
        rows, width = array.shape
        own = [shard.data for shard in array.addressable_shards]
        both = jax.make_array_from_single_device_arrays((2 * rows, width), self._given, own)
        return self._carry(both)


def _carry(share: int, whole: Array) -> Array:
    """What a device of the target gets: the source's columns, so many of them; one of the source
    gets zeros."""
    start = 0
    if share < whole.shape[1]:
        start = lax.axis_index(DEVICE) * share
    part = lax.dynamic_slice_in_dim(whole, start, share, axis=1)
    return lax.ppermute(part, STAGE, [(0, 1)])
