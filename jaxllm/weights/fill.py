"""Parameters filled with what their rules name.

Small ones are made on the host and placed one by one. All others are read by several threads into
reused pinned buffers, chunk by chunk, and written on the devices into arrays that are there before.
So the host needs no memory beside the buffers, and all threads work at one large parameter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.nn.rules import Rule
from jaxllm.weights.blocks import Index, View, place, read_block
from jaxllm.weights.rounding import Rounding
from jaxllm.weights.staging import (
    BUFFER_BYTES,
    SLOTS,
    WORDS,
    Buffer,
    cut,
    part_bytes,
    part_shape,
    places,
    readers,
    slots,
    staged,
)

SMALL_BYTES = 2**20  # of a parameter's part on one device, up to which it is placed as it is
ALIGNED = 256  # bytes; chunks begin at multiples of them

# Devices of this process in groups that hold the same part of a parameter
type Groups = tuple[tuple[jax.Device, ...], ...]
type Row = Mapping[jax.Device, Buffer]  # one buffer of each device
type Sent = dict[jax.Device, tuple[Array, Array]]  # its bytes and places on each device


def is_small(like: jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter is placed as it is."""
    return part_bytes(like) <= SMALL_BYTES


class Chunk(NamedTuple):
    """What goes through a buffer at once, of each device's part of a parameter.

    Attributes:
        start: its first entry within the part, along each axis.
        shape: of the chunk.
        size: in bytes.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    size: int


class Target:
    """A parameter, or the plain weight that several are rounded from, on its way to the devices.

    Attributes:
        like: what it will be.
        groups: its devices.
        chunks: all of it.
    """

    def __init__(self, rule: Rule, rounding: Rounding):
        self.rule = rule
        self.like = rounding.like(rule)
        self._rounding = rounding
        owners: dict[Index, list[jax.Device]] = {}
        indices = self.like.sharding.addressable_devices_indices_map(self.like.shape)
        for device, index in indices.items():
            owners.setdefault(index, []).append(device)
        self._indices = list(owners)
        self.groups: Groups = tuple(map(tuple, owners.values()))
        size = self.like.dtype.itemsize
        self.chunks = [
            Chunk(start, shape, math.prod(shape) * size)
            for start, shape in cut(part_shape(self.like), size)
        ]
        self._written = 0
        self._array = None

    def read(self, chunk: Chunk, group: int, view: View, out: np.ndarray) -> None:
        """Read a group's chunk into these bytes."""
        bounds = zip(self._indices[group], self.like.shape, strict=True)
        firsts = [part.indices(size)[0] for part, size in bounds]
        wanted = zip(firsts, chunk.start, chunk.shape, strict=True)
        index = tuple(slice(first + start, first + start + count) for first, start, count in wanted)
        block = out.view(self.like.dtype).reshape(chunk.shape)
        read_block(self.rule, self.like, index, view, block)

    def write(self, staged: Array, places: Array, slot: Array) -> bool:
        """Write a chunk that the devices have in staged bytes; whether it was the last one."""
        array = self._rounding.room(self.rule) if self._array is None else self._array
        self._array = self._rounding.loader.writer(self.like)(array, staged, places, slot)
        self._written += 1
        return self._written == len(self.chunks)

    def finish(self) -> dict[str, Array]:
        """The parameters, once all chunks are written."""
        array = self._array
        self._array = None
        assert array is not None
        return self._rounding.finished(self.rule, array)


@dataclass
class Batch:
    """Chunks that go through one buffer of each device.

    Attributes:
        groups: of all their targets.
        chunks: with their targets and first bytes in the buffer.
        size: bytes of the buffer that are taken.
    """

    groups: Groups
    chunks: list[tuple[Target, Chunk, int]] = field(default_factory=list)
    size: int = 0

    def add(self, target: Target, chunk: Chunk) -> bool:
        """Whether there was room."""
        if self.size + chunk.size > BUFFER_BYTES or len(self.chunks) == SLOTS:
            return False
        self.chunks.append((target, chunk, self.size))
        self.size += -(-chunk.size // ALIGNED) * ALIGNED
        return True

    def send(self, group: int, row: Row, view: View) -> Sent:
        """Fill the buffers of a group's devices, all with the same, and have the devices copy
        them."""
        buffers = [(device, row[device]) for device in self.groups[group]]
        first, *others = [buffer.lease() for _, buffer in buffers]
        for target, chunk, offset in self.chunks:
            target.read(chunk, group, view, first[offset : offset + chunk.size])
        for buffer in others:
            buffer[: self.size] = first[: self.size]
        table = np.zeros((SLOTS, WORDS), np.int32)
        for line, (_, chunk, offset) in zip(table, self.chunks, strict=False):
            line[: 1 + len(chunk.start)] = offset, *chunk.start
        return {
            device: (buffer.send(), jax.device_put(table, device)) for device, buffer in buffers
        }

    def write(self, sent: Sent, row: Row, numbers: Sequence[Array]) -> Iterator[Target]:
        """Have the devices write the chunks, of which these are the numbers; gives the targets that
        are then whole."""
        mesh = self.chunks[0][0].like.sharding.mesh
        buffers, tables = zip(*(sent[device] for device in row), strict=True)
        arrays = _joined(staged(mesh), buffers), _joined(places(mesh), tables)
        for (target, *_), number in zip(self.chunks, numbers, strict=False):
            if target.write(*arrays, number):
                yield target


def _joined(like: jax.ShapeDtypeStruct, parts: Sequence[Array]) -> Array:
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def batches(targets: Iterable[Target]) -> Iterator[Batch]:
    """The targets in batches. One that will be rounded is whole before the next one begins, so that
    devices hold one plain weight."""
    filling: dict[Groups, Batch] = {}
    for target in targets:
        for chunk in target.chunks:
            batch = filling.setdefault(target.groups, Batch(target.groups))
            if not batch.add(target, chunk):
                yield batch
                filling[target.groups] = batch = Batch(target.groups)
                batch.add(target, chunk)
        if target.rule.rounded is not None:
            yield from filling.values()
            filling = {}
    yield from filling.values()


def fill(rules: Sequence[Rule], rounding: Rounding, view: View) -> Iterator[Mapping[str, Array]]:
    """The parameters of all rules, as they are done.

    Small ones come first: placed later, they would lie between what is in use for a moment, and
    what is freed then would be holes.
    """
    loader = rounding.loader
    likes = [(rule, rounding.like(rule)) for rule in rules]
    small = [pair for pair in likes if is_small(pair[1])]
    targets = [Target(rule, rounding) for rule, like in likes if not is_small(like)]
    # Threads end before the buffers that they fill are given back
    with (
        loader.buffers.lease(*_needed(target.like for target in targets)) as rows,
        ThreadPoolExecutor(readers(), thread_name_prefix="weights") as pool,
    ):
        compiled = [
            pool.submit(loader.writer, like) for like in {target.like for target in targets}
        ]
        placed = pool.map(lambda pair: jax.block_until_ready(place(pair[0], pair[1], view)), small)
        for (rule, _), array in zip(small, placed, strict=True):
            yield rounding.finished(rule, array)
        for program in compiled:
            program.result()
        yield from _Pipeline(pool, view, rows).run(targets)


def prepare(rules: Iterable[Rule], rounding: Rounding) -> None:
    """Make the buffers and compile the programs of a `fill` to come."""
    likes = {like for like in map(rounding.like, rules) if not is_small(like)}
    loader = rounding.loader
    with loader.buffers.lease(*_needed(likes)), ThreadPoolExecutor(readers()) as pool:
        list(pool.map(loader.writer, likes))
        list(pool.map(loader.zeros, likes))


def _needed(likes: Iterable[jax.ShapeDtypeStruct]) -> tuple[list[jax.Device], int]:
    """Devices of this process that hold these parameters, and the bytes of each."""
    likes = list(likes)
    devices = {device for like in likes for device in like.sharding.addressable_devices}
    return sorted(devices, key=lambda device: device.id), sum(map(part_bytes, likes))


class _Pipeline:
    """Has batches read and sent by threads, and written in order."""

    def __init__(self, pool: ThreadPoolExecutor, view: View, rows: Iterable[Row]):
        self._pool = pool
        self._view = view
        self._free = deque(rows)
        self._slots: Sequence[Array] = ()
        self._reading: deque[tuple[Batch, Row, list[Future[Sent]]]] = deque()

    def run(self, targets: Sequence[Target]) -> Iterator[Mapping[str, Array]]:
        """The parameters of each target."""
        if targets:
            self._slots = slots(targets[0].like.sharding.mesh)
        try:
            for batch in batches(targets):
                if not self._free:
                    yield from self._write_first()
                row = self._free.popleft()
                done = [
                    self._pool.submit(batch.send, group, row, self._view)
                    for group in range(len(batch.groups))
                ]
                self._reading.append((batch, row, done))
            while self._reading:
                yield from self._write_first()
        finally:
            for *_, done in self._reading:
                for sending in done:
                    sending.cancel()

    def _write_first(self) -> Iterator[Mapping[str, Array]]:
        batch, row, done = self._reading.popleft()
        sent: Sent = {}
        for sending in done:
            sent |= sending.result()
        for target in batch.write(sent, row, self._slots):
            yield target.finish()
        self._free.append(row)
