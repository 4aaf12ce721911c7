"""The devices that an exchange is over, and where each device's inbox lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
from jax import Array
from jax.sharding import Mesh

LANES = 128  # threads of a block
WORD = 4  # bytes
STATIC = {"static": True}

type Axes = str | tuple[str, ...]  # of a mesh, which are taken as one


@dataclass(frozen=True)
class Layout:
    """Where the rows of an exchange lie in an inbox, in bytes; equal on all devices.

    A header comes first. Then follow records of rows that every device sends to every other one,
    then records of rows that their owner adds up: what it receives, and what it gives back. Each
    record has a counter for each thread, unless another record of the row has it, and two places
    that are used in turn. A place has a slot for each sender.

    Attributes:
        devices: X.
        row: bytes of a row at most, a multiple of 512.
        one_shot, two_shot: rows of an exchange at most, of either kind.
    """

    devices: int
    row: int
    one_shot: int
    two_shot: int = 0

    header = counters = LANES * WORD

    @property
    def slots(self) -> int:
        """Rows of a place that all send to. Two devices need none for what they send themselves."""
        if self.devices == 2:
            return 1
        return self.devices

    @property
    def one_shot_record(self) -> int:
        return self.counters + 2 * self.slots * self.row

    @property
    def total_record(self) -> int:
        """Of the finished sum of a row."""
        return self.counters + 2 * self.row

    @property
    def part_record(self) -> int:
        """Of all parts of a row, at its owner; the counters are those of its finished sum."""
        return 2 * self.slots * self.row

    @property
    def totals(self) -> int:
        """Where the records of finished sums begin."""
        return self.header + self.one_shot * self.one_shot_record

    @property
    def parts(self) -> int:
        """Where the records of parts begin."""
        return self.totals + self.two_shot * self.total_record

    @property
    def size(self) -> int:
        """Bytes of an inbox."""
        return self.parts + -(-self.two_shot // self.devices) * self.part_record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inbox:
    """One device's inbox inside a program. Programs take it and never donate it: peers write to its
    address.

    Attributes:
        words: [layout.size / 4] int32.
        table: [TABLE] int32; see `inboxes`.
    """

    words: Array
    table: Array
    layout: Layout = field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Group:
    """The devices along axes of a mesh, seen by one of them inside a `shard_map`.

    Attributes:
        axis: the name, or names, of these.
        devices: X, how many there are.
        inbox: None where the back ends that need one are not in use.
    """

    axis: Axes = field(metadata=STATIC)
    devices: int = field(metadata=STATIC)
    inbox: Inbox | None = None


def size_of(mesh: Mesh, axis: Axes) -> int:
    """Devices along the axes."""
    return math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis))
