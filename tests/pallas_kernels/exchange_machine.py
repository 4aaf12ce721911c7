"""Runs the assembly of an exchange on emulated devices, in any order that a card may choose.

Each thread runs its text by itself and may be interrupted at every access to memory. Stores arrive
late, in any order, word by word; those to a device's own memory are there when its kernel ends,
and a device sees its own ones at once. Blocks of a kernel start in order, and few run at once. A
word of a row is a number modulo 2^32, of which `NEVER` means 0, as the kernel's sums would have it.
"""

from __future__ import annotations

import functools
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.all_reduce.group import Layout
from pallas_kernels.all_reduce.protocol import (
    ERROR,
    HEX,
    INBOXES,
    POLLS,
    RANK,
    Region,
    opening,
    putting,
    taking,
)

MASK, FAR, TABLES, HOST = 2**32 - 1, 2**40, 2**50, 2**51
NEVER = int(HEX, 0)

type Thread = Generator[None, None, Any]
type Exchange = Callable[["World", int, int, int, Sequence[int]], Thread]


def sane(word: int) -> int:
    return 0 if word == NEVER else word


@functools.cache
def parsed(text: str) -> list[tuple[str, str, list[str]]]:
    """(predicate, operation, operands) of each line; a label is an operation."""
    found = []
    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        match = re.fullmatch(r"(?:@(\w+) )?([\w.:]+)(?: (.*))?", line.rstrip(";"))
        assert match, line
        operands = re.findall(r"\[[^]]*\]|\{[^}]*\}|[^,{}\s]+", match[3] or "")
        found.append((match[1] or "", match[2], operands))
    return found


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


ARITHMETIC: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "mov.b64": lambda a: a,
    "add.s32": lambda a, b: (a + b) & MASK,
    "add.s64": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "mul.wide.u32": lambda a, b: a * b,
    "selp.b32": lambda a, b, p: a if p else b,
    "setp.eq.b32": lambda a, b: a == b,
    "setp.eq.s32": lambda a, b: a == b,
    "setp.eq.or.b32": lambda a, b, p: a == b or p,
    "setp.gt.and.s32": lambda a, b, p: signed(a) > b and p,
}
LOADS = ("ld.global.b32", "ld.global.b64", "ld.relaxed.sys.global.b32")
ACCESS = re.compile(r"(ld|st)(?:\.relaxed\.sys)?\.global(?:\.v[24])?\.b(32|64)")


@dataclass
class World:
    """Some devices, their inboxes and tables, and stores that have not arrived.

    Attributes:
        texts: changes of a text before it runs, for tests of the tests.
    """

    layout: Layout
    polls: int
    rng: random.Random
    texts: Callable[[str], str] = lambda text: text
    memory: dict[int, int] = field(default_factory=dict)
    polled: int = 0

    def __post_init__(self) -> None:
        self.devices = self.layout.devices
        self.fill()

    def fill(self) -> None:
        """As the owner of the inboxes does before a first use and after a failure."""
        self.memory.clear()
        self.pending: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for d in range(self.devices):
            table = TABLES + d * 4096
            self.memory |= {table + 4 * RANK: d, table + 4 * POLLS: self.polls}
            self.memory |= {table + 4 * ERROR: HOST + 4 * d, HOST + 4 * d: 0}
            for i in range(self.devices):
                self.memory[table + 4 * INBOXES + 8 * i] = FAR * (1 + (d + i) % self.devices)

    def gave_up(self) -> list[int]:
        """The error words on the host."""
        return [self.memory[HOST + 4 * d] for d in range(self.devices)]

    def load(self, device: int, address: int) -> int:
        waiting = self.pending.get((device, address))
        return waiting[-1] if waiting else self.memory.get(address, NEVER)

    def deliver(self, key: tuple[int, int]) -> None:
        """Let the oldest store of a device to an address arrive."""
        waiting = self.pending[key]
        self.memory[key[1]] = waiting.popleft()
        if not waiting:
            del self.pending[key]

    def finish_kernel(self, device: int) -> None:
        """The device's stores to its own memory and to the host are there."""
        for key in [key for key in self.pending if key[0] == device]:
            while key in self.pending and (key[1] // FAR == device + 1 or key[1] >= HOST):
                self.deliver(key)

    def asm(self, device: int, lane: int, text: str, results: int, *operands: int) -> Thread:
        """Run a text as one thread; returns its results."""
        names: dict[str, Any] = {f"${results + i}": x for i, x in enumerate(operands)}
        names["%tid.x"] = lane
        lines = parsed(self.texts(text))
        at = 0
        while at < len(lines):
            predicate, op, given = lines[at]
            at += 1
            if op.endswith(":") or (predicate and not names[predicate]):
                continue
            if op == "bra":
                self.polled += 1
                at = next(i for i, line in enumerate(lines) if line[1] == f"{given[0]}:")
            elif op in ARITHMETIC:
                values = (names[x] if x in names else int(x, 0) for x in given[1:])
                names[given[0]] = ARITHMETIC[op](*values)
            else:
                yield from self._access(device, op, given, names)
        return [names[f"${i}"] for i in range(results)]

    def _access(self, device: int, op: str, given: list[str], names: dict[str, Any]) -> Thread:
        kind = ACCESS.fullmatch(op)
        assert kind, op
        where, what = given if kind[1] == "st" else given[::-1]
        base, _, offset = where.strip("[]").partition("+")
        address, width = names[base] + int(offset or 0), int(kind[2]) // 8
        listed = re.findall(r"\w+", what)
        assert address % (width * len(listed)) == 0
        for i, name in enumerate(listed):
            yield
            here = address + i * width
            if kind[1] == "ld":
                names[name] = self.load(device, here)
            else:
                value = names[name] if name in names else int(name, 0)
                self.pending[device, here].append(value)


def one_shot(world: World, device: int, row: int, lane: int, part: Sequence[int]) -> Thread:
    """As the kernel: to everyone, then the sum of what came."""
    layout, region = world.layout, Region.one_shot(world.layout)
    inbox, table = FAR * (1 + device), TABLES + device * 4096
    run = functools.partial(world.asm, device, lane)
    text = opening(layout.header, layout.one_shot_record)
    (place,) = yield from run(text, 1, inbox, row)
    for to in (*range(1, world.devices), *([0] if layout.slots > 1 else [])):
        yield from run(putting(len(part), len(part), region), 0, table, to, row, place, *part)
    slots = [*range(layout.slots)]
    text = taking(len(part), len(part), region, slots)
    taken = yield from run(text, len(part) * len(slots), inbox, table, row, place)
    return _sums([*taken, *(part if layout.slots == 1 else [])], len(part))


def two_shot(world: World, device: int, row: int, lane: int, part: Sequence[int]) -> Thread:
    """As the kernel: to the row's owner, which sends the sum to everyone."""
    layout, X = world.layout, world.devices
    parts, totals = Region.parts(layout), Region.totals(layout)
    inbox, table = FAR * (1 + device), TABLES + device * 4096
    run = functools.partial(world.asm, device, lane)
    count = len(part)
    text = opening(layout.totals, layout.total_record)
    (place,) = yield from run(text, 1, inbox, row)
    owner = (row - device) % X
    yield from run(putting(count, count, parts), 0, table, owner, row // X, place, *part)
    if owner == 0:
        text = taking(count, count, parts, [*range(X)])
        taken = yield from run(text, count * X, inbox, table, row // X, place)
        for to in (*range(1, X), 0):
            text = putting(count, count, totals)
            yield from run(text, 0, table, to, row, place, *_sums(taken, count))
    text = taking(count, count, totals, [0])
    return (yield from run(text, count, inbox, table, row, place))


def _sums(words: Sequence[int], count: int) -> list[int]:
    return [sum(sane(word) for word in words[i::count]) & MASK for i in range(count)]


@dataclass
class Kernel:
    """One launch: the parts of each device, row and lane."""

    exchange: Exchange
    parts: dict[tuple[int, int, int], list[int]]
    rows: int
    lanes: tuple[int, ...]


class Device:
    """Runs its kernels in order; blocks start in order, `resident` at once."""

    def __init__(self, world: World, number: int, kernels: Sequence[Kernel], resident: int):
        self.world, self.number, self.kernels, self.resident = world, number, kernels, resident
        self.results: list[dict[tuple[int, int], list[int]]] = []
        self._begin()

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.kernels)

    def step(self) -> None:
        """One access of one thread."""
        row, lane = self.world.rng.choice([*self._running])
        try:
            next(self._running[row, lane])
        except StopIteration as end:
            del self._running[row, lane]
            self._found[row, lane] = end.value
            self._start_blocks()
            if not self._running:
                self.world.finish_kernel(self.number)
                self.results.append(self._found)
                self._begin()

    def _begin(self) -> None:
        self._running: dict[tuple[int, int], Thread] = {}
        self._found: dict[tuple[int, int], list[int]] = {}
        self._next = 0
        if not self.is_done:
            self._start_blocks()

    def _start_blocks(self) -> None:
        kernel = self.kernels[len(self.results)]
        while self._next < kernel.rows and len({r for r, _ in self._running}) < self.resident:
            row, self._next = self._next, self._next + 1
            for lane in kernel.lanes:
                part = kernel.parts[self.number, row, lane]
                thread = kernel.exchange(self.world, self.number, row, lane, part)
                self._running[row, lane] = thread


def run(
    world: World, kernels: Sequence[Kernel], stops: dict[int, int] | None = None, steps: int = 10**6
) -> list[Device]:
    """Run the same kernels on all devices, in a random order, until they are done. `stops` has the
    step after which a device does nothing more. Fails if it does not end."""
    rng, stops = world.rng, stops or {}
    devices = [Device(world, d, kernels, rng.randint(1, 3)) for d in range(world.devices)]
    haste = [rng.choice([1, 1, 4, 16]) for _ in devices]
    arrival = rng.choice([0.1, 0.5, 0.9])
    for step in range(steps):
        ready = [d for d in devices if not d.is_done and step < stops.get(d.number, steps)]
        if not ready:
            return devices
        if world.pending and rng.random() < arrival:
            world.deliver(rng.choice([*world.pending]))
        else:
            rng.choices(ready, [haste[d.number] for d in ready])[0].step()
    raise AssertionError("the exchange does not end")
