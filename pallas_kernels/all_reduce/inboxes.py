"""Owns the inboxes of the devices of one process, and tells each device where the others' lie."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_reduce.group import WORD, Axes, Group, Inbox, Layout
from pallas_kernels.all_reduce.protocol import ERROR, INBOXES, NEVER, POLLS, RANK, TABLE

PATIENCE = 1 << 20  # polls; about a second on an H200
IMPATIENCE = 1


class PeerTimeout(RuntimeError):
    """A device waited in vain for another one; the results of the step are wrong."""


class Inboxes:
    """Inboxes along axes of a mesh, which programs take as `arrays` and never donate.

    Kernels that are loaded, or recorded in a graph, while a peer waits for them can stop both. So
    programs first run between `expect_nobody` and `refill`, when nobody waits.

    Attributes:
        layout: of each inbox.
        arrays: inboxes and tables of all devices, int32, split over the axes.
    """

    def __init__(self, mesh: Mesh, axis: Axes, layout: Layout):
        split = NamedSharding(mesh, PartitionSpec(axis))
        shape = (layout.devices * layout.size // WORD,)
        self.layout = layout
        words = jax.jit(lambda: jnp.full(shape, NEVER, jnp.int32), out_shardings=split)()
        # The host reads them where kernels write them
        host = split.with_memory_kind("pinned_host")
        self._errors = jax.device_put(np.zeros(layout.devices, np.int32), host)
        self._views = [_view(shard.data) for shard in _shards(self._errors)]
        self._addresses = _addresses(words)
        rows = _table(self._addresses, _addresses(self._errors))
        self.arrays = words, jax.device_put(rows.reshape(-1), split)
        self._refill = jax.jit(
            lambda words, table, polls: (
                jnp.full_like(words, NEVER),
                table.reshape(-1, TABLE).at[:, POLLS].set(polls).reshape(-1),
            ),
            donate_argnums=(0, 1),
            keep_unused=True,
            out_shardings=(split, split),
        )
        self.expect_nobody()

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of `arrays`."""
        return shapes(self.arrays[0].sharding, self.layout)

    def expect_nobody(self) -> None:
        """From now on kernels poll once: sums are wrong."""
        self._fill(IMPATIENCE)

    def refill(self) -> None:
        """Make all inboxes empty, after programs were loaded and after a step that failed. No
        program may be running."""
        self._fill(PATIENCE)

    def check(self) -> None:
        """Raise PeerTimeout if a device has given up. To be called when results of a step were
        read; it costs no transfer."""
        given_up = [rank for rank, view in enumerate(self._views) if view[0]]
        if given_up:
            raise PeerTimeout(
                f"of the {self.layout.devices} devices that add up, "
                f"{', '.join(map(str, given_up))} waited in vain for another one; the step failed: "
                "look for a device that hangs or was lost"
            )

    def _fill(self, polls: int) -> None:
        self.arrays = jax.block_until_ready(self._refill(*self.arrays, np.int32(polls)))
        if _addresses(self.arrays[0]) != self._addresses:
            raise RuntimeError("XLA has moved the inboxes; restart the engine")
        for view in self._views:
            view[0] = 0


def group_of(axis: Axes, layout: Layout, words: Array, table: Array) -> Group:
    """The group inside a `shard_map` over the axes, from a device's part of `Inboxes.arrays`."""
    return Group(axis, layout.devices, Inbox(words, table, layout))


def shapes(split: NamedSharding, layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of inboxes before there are any."""
    return tuple(
        jax.ShapeDtypeStruct((layout.devices * size,), jnp.int32, sharding=split)
        for size in (layout.size // WORD, TABLE)
    )


def _table(inboxes: list[int], errors: list[int]) -> np.ndarray:
    """The table of each device, `[X, TABLE]` int32."""
    table = np.zeros((len(inboxes), TABLE), np.int32)
    for rank, row in enumerate(table):
        row[RANK] = rank
        addresses = [errors[rank], *(inboxes[rank:] + inboxes[:rank])]
        places = [ERROR, *range(INBOXES, INBOXES + 2 * len(inboxes), 2)]
        for place, address in zip(places, addresses, strict=True):
            row[place : place + 2] = np.array([address], np.uint64).view(np.int32)
    return table


def _shards(array: Array) -> list[jax.Shard]:
    """The parts of an array in the order of its axis."""
    return sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)


def _addresses(array: Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in _shards(array)]


def _view(array: Array) -> np.ndarray:
    """One word of pinned host memory, writable. The caller keeps the array."""
    memory = (ctypes.c_char * WORD).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.int32)
