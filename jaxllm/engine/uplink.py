"""Host arrays on their way to the device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding


class Uplink:
    """Sends int32 buffers of one size, `slots` of them in turn.

    Where the sharding names pinned host memory, the buffers are made once and written in place: the device reads them when the program
    that takes them runs. So the program that took a buffer must have ended `slots` sends later. Elsewhere every send makes an array.
    """

    def __init__(self, size: int, sharding: NamedSharding, slots: int):
        self._size, self._sharding, self._next = size, sharding, 0
        self._pinned = [jax.device_put(np.zeros(size, np.int32), sharding) for _ in range(slots if _is_pinned(sharding) else 0)]
        self._views = [[_view(shard.data, size) for shard in array.addressable_shards] for array in self._pinned]

    def send(self, parts: Sequence[np.ndarray]) -> Array:
        """The parts one after another; what is left of the buffer may hold anything."""
        if not self._pinned:
            flat = np.concatenate(parts)
            return jax.device_put(np.pad(flat, (0, self._size - flat.size)), self._sharding)
        slot, self._next = self._next, (self._next + 1) % len(self._pinned)
        for view in self._views[slot]:
            start = 0
            for part in parts:
                view[start : start + part.size] = part
                start += part.size
        return self._pinned[slot]


def _is_pinned(sharding: NamedSharding) -> bool:
    return sharding.memory_kind == "pinned_host"


def _view(array: Array, size: int) -> np.ndarray:
    """The memory of an array in pinned host memory, writable."""
    array.block_until_ready()
    pointer = ctypes.cast(array.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_int32))
    return np.ctypeslib.as_array(pointer, (size,))
