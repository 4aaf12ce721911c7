"""What a step hands to the device, as plain data; the host buffers that carry it; results back."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.program import Key
from jaxllm.mesh import is_pinned, memory_of, place


class Launch(NamedTuple):
    """Programs in order, each with the int32 buffer that the host hands over, if it takes one.

    It holds nothing else, so a process with an equal engine can replay it. Buffers may be views of
    memory that later steps reuse: write a launch to bytes before the next one is packed.
    """

    calls: tuple[tuple[Key, np.ndarray | None], ...]

    def to_bytes(self) -> bytes:
        """The launch for another process."""
        return msgspec.msgpack.encode(
            [(*key, None if buffer is None else buffer.tobytes()) for key, buffer in self.calls]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Launch:
        """The launch that `to_bytes` wrote."""
        found = msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...], bytes | None]])
        return cls(
            tuple(
                (Key(name, sizes), None if raw is None else np.frombuffer(raw, np.int32))
                for name, sizes, raw in found
            )
        )


class HostBuffers:
    """Sends int32 buffers of one size, `slots` of them in turn.

    Where the sharding names pinned host memory, the buffers are made once and written in place: the
    device reads them when the program that takes them runs. So the program that took a buffer must
    have ended `slots` sends later; `until` makes that send wait for it. Elsewhere every send makes
    an array.
    """

    def __init__(self, size: int, sharding: NamedSharding, slots: int):
        self._size = size
        self._sharding = sharding
        self._next = 0
        self._pinned = [
            place(np.zeros(size, np.int32), sharding)
            for _ in range(slots if is_pinned(sharding) else 0)
        ]
        self._busy: list[Array | None] = [None] * slots
        self._leased: np.ndarray | None = None
        self._views = [
            [
                memory_of(shard.data, (size,), np.dtype(np.int32))
                for shard in array.addressable_shards
            ]
            for array in self._pinned
        ]

    def lease(self) -> np.ndarray:
        """Memory to fill for the next `send`, which then copies nothing where the device reads it
        directly. It may hold anything."""
        if not self._pinned:
            return np.zeros(self._size, np.int32)
        if self._leased is None:
            self._leased = self._next_views()[0]
        return self._leased

    def send(self, buffer: np.ndarray) -> Array:
        """A buffer, leased or not, on its way to the device. If it is shorter than the size, the
        rest may hold anything."""
        if not self._pinned:
            whole = np.zeros(self._size, np.int32)  # a copy: JAX may keep what it is given
            whole[: buffer.size] = buffer
            return place(whole, self._sharding)
        leased = self._leased
        self._leased = None
        if leased is None:
            views = self._next_views()
        else:
            views = self._views[self._next - 1]
        for view in views:
            if view is not buffer:
                view[: buffer.size] = buffer
        return self._pinned[self._next - 1]

    def until(self, taken: Array) -> None:
        """The buffer that was sent last may be written again once this array, a result of the
        program that took it, is there."""
        self._busy[self._next - 1] = taken

    def _next_views(self) -> list[np.ndarray]:
        """The memory of the next buffer on each device, as soon as the program that took it last
        has ended."""
        slot = self._next
        self._next = (self._next + 1) % len(self._pinned)
        if (busy := self._busy[slot]) is not None:
            busy.block_until_ready()
        return self._views[slot]


def begin_read(array: Array) -> None:
    """Start bringing a result to the host, where that takes a copy."""
    if not is_pinned(array.sharding):
        array.copy_to_host_async()


def read(array: Array) -> np.ndarray:
    """A result on the host, as soon as it is there. From pinned memory it is copied by hand: a
    NumPy view of such an array may outlive the array by a moment when both are dropped, and JAX
    0.11 aborts the process when it then gives back what is gone already."""
    if not is_pinned(array.sharding):
        return np.asarray(array)
    return memory_of(array.addressable_data(0), array.shape, array.dtype).copy()


def view(array: Array) -> np.ndarray:
    """A result on the host, as soon as it is there, without a copy where it lies in pinned memory
    of one device. The caller keeps the array for as long as it uses the view."""
    if not is_pinned(array.sharding) or len(array.addressable_shards) > 1:
        return np.asarray(array)
    return memory_of(array.addressable_data(0), array.shape, array.dtype)


def fill(array: Array, value: np.ndarray) -> None:
    """Write an array in pinned memory in place. Nothing may read it meanwhile."""
    for shard in array.addressable_shards:
        memory_of(shard.data, shard.data.shape, value.dtype)[:] = value[shard.index]
