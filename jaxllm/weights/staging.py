"""Pinned host memory through which weights reach the devices, and the program that puts them in
their place there.

A device copies from pinned memory at the speed of its link, while other threads fill the next
buffers. Pinning takes 0.6 s a GiB, and memory that a process touches for the first time half as
long, so a few buffers are made at the start and serve every load.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxllm.config import ConfigError
from jaxllm.mesh import PINNED, lacks_memory, memory_of, per_device

BUFFER_BYTES = 2**25
# That fit a buffer. With one, the room behind it is sent in vain; with many, launches take longer
CHUNKS = 2
SLOTS = 32  # blocks in a buffer at most
WORDS = 8  # of a block's place: its offset in the buffer and its start, along up to 7 axes
# XLA's client pins regions of 1, 1, 2, 4 and 8 buffers for the first 16. One is left for small
# arrays, for which it would pin a region as large as all before
MOST_BUFFERS = 16
SPARE_BUFFERS = 2  # on their way to the device while every reader fills one


def readers() -> int:
    """Threads that fill buffers."""
    return max(1, min(os.cpu_count() or 1, MOST_BUFFERS - 1 - SPARE_BUFFERS))


class Buffer:
    """Bytes in pinned memory that one device copies."""

    def __init__(self, device: jax.Device):
        self._device = device
        # Each of its own source, which a CPU may take as it is
        self._array = jax.device_put(
            np.zeros(BUFFER_BYTES, np.uint8), SingleDeviceSharding(device, memory_kind=PINNED)
        )
        self._memory = memory_of(self._array, self._array.shape, np.dtype(np.uint8))
        self._sent: Array | None = None

    def lease(self) -> np.ndarray:
        """The memory, to be filled, as soon as the device has what was sent last."""
        self.rest()
        return self._memory

    def send(self) -> Array:
        """The bytes on their way to the device."""
        self._sent = jax.device_put(self._array, SingleDeviceSharding(self._device))
        return self._sent

    def rest(self) -> None:
        """Wait until the device has what was sent last, and forget it."""
        if (sent := self._sent) is not None:
            sent.block_until_ready()
        self._sent = None


class BufferPool:
    """Buffers that no load uses, kept for the next one. XLA's client for GPUs keeps what it has
    pinned, for buffers of other pools too."""

    def __init__(self) -> None:
        self._free: dict[jax.Device, list[Buffer]] = {}
        self._turn = threading.Lock()

    @contextmanager
    def lease(
        self, devices: Sequence[jax.Device], size: int
    ) -> Iterator[list[dict[jax.Device, Buffer]]]:
        """Rows of one buffer of each of these devices, for a load of `size` bytes on each. Those
        that no load of before has made are made, or fewer where no more memory can be pinned.

        Raises ConfigError if there is none.
        """
        most = min(readers() + SPARE_BUFFERS, max(3, MOST_BUFFERS // max(1, len(devices)) - 1))
        count = min(most, -(-size // BUFFER_BYTES))
        with self._turn:
            free = {device: self._free.pop(device, []) for device in devices}
        try:
            for device, buffers in free.items():
                buffers += _made(device, count - len(buffers))
                if count and not buffers:
                    raise ConfigError(
                        f"no host memory could be pinned, through which weights reach {device}; "
                        f"{BUFFER_BYTES >> 20} MiB are needed: free some, or raise the limit of "
                        "this container or of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
                    )
            yield [dict(zip(free, row, strict=True)) for row in zip(*free.values(), strict=False)]
        finally:
            for buffers in free.values():
                for buffer in buffers:
                    buffer.rest()
            with self._turn:
                for device, buffers in free.items():
                    self._free.setdefault(device, []).extend(buffers)


def _made(device: jax.Device, count: int) -> list[Buffer]:
    """So many buffers, or as many as memory can be pinned for."""
    made: list[Buffer] = []
    try:
        while len(made) < count:
            made.append(Buffer(device))
    except jax.errors.JaxRuntimeError as error:
        if not lacks_memory(error):
            raise
    return made


def part_shape(like: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of the part of a parameter that each device holds."""
    return like.sharding.shard_shape(like.shape)


def part_bytes(like: jax.ShapeDtypeStruct) -> int:
    """The bytes of the part of a parameter that each device holds."""
    return math.prod(part_shape(like)) * like.dtype.itemsize


def cut(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and shape of blocks that cover an array. All have one shape, lie in one piece and fit a
    buffer `CHUNKS` times; the last may overlap the one before."""
    most = BUFFER_BYTES // CHUNKS
    rows = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
    axis = next(axis for axis, row in enumerate(rows) if row <= most)
    parts = -(-shape[axis] // (most // rows[axis]))
    count = -(-shape[axis] // parts)
    rest = shape[axis + 1 :]
    for lead in np.ndindex(shape[:axis]):
        for part in range(parts):
            first = min(part * count, shape[axis] - count)
            yield (*lead, first, *(0 for _ in rest)), ((1,) * axis + (count, *rest))


def staged(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A buffer's bytes on each device."""
    return _of_each(mesh, (BUFFER_BYTES,), np.uint8)


def places(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """On each device, [offset, *start] of the blocks in its buffer."""
    return _of_each(mesh, (SLOTS, WORDS), np.int32)


def _of_each(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), dtype, sharding=where)


def slots(mesh: Mesh) -> list[Array]:
    """The numbers of a buffer's blocks, on the devices. A number that each launch brought along
    would wait there behind the buffers that are on their way. A load makes them and drops them:
    what stayed would keep memory from being given back."""
    where = NamedSharding(mesh, PartitionSpec())
    numbers = np.arange(SLOTS, dtype=np.int32)
    return [jax.make_array_from_callback((), where, lambda _, n=n: np.asarray(n)) for n in numbers]


def compile_zeros(like: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """The program () → zeros of a parameter's shape, over its devices."""
    zeros = functools.partial(jnp.zeros, like.shape, like.dtype)
    return jax.jit(zeros, out_shardings=like.sharding).lower().compile()


def compile_writer(like: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """The program (parameter, staged bytes, places, slot) → the parameter, in place, with one of
    the blocks of `cut` of each device's part: its bytes begin at the offset, its entries at the
    start."""
    where = like.sharding
    _, block = next(cut(part_shape(like), like.dtype.itemsize))
    whole = NamedSharding(where.mesh, PartitionSpec())
    slot = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    takes = (like, staged(where.mesh), places(where.mesh), slot)
    function = per_device(functools.partial(_write, block), where.mesh, takes, like)
    program = jax.jit(function, donate_argnums=0, out_shardings=where)
    return program.lower(*takes).compile()


def _write(
    block: tuple[int, ...], target: Array, staged: Array, places: Array, slot: Array
) -> Array:
    size = target.dtype.itemsize
    place = jax.lax.dynamic_index_in_dim(places, slot, keepdims=False)
    place = jax.lax.optimization_barrier(place)  # a CPU would look it up for every entry
    stored = jax.lax.dynamic_slice(staged, (place[0],), (math.prod(block) * size,))
    if size > 1:
        stored = stored.reshape(-1, size)
    chunk = jax.lax.bitcast_convert_type(stored, target.dtype).reshape(block)
    return jax.lax.dynamic_update_slice(target, chunk, tuple(place[1 : 1 + target.ndim]))
