"""Runs the assembly of lane programs on the CPU, line by line for all lanes: what a card would do
with the text itself, which the emulated machine never sees.

Arrays lie at addresses of their own, those in `far` beyond 32 bits; an access outside of every
array fails.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.lanes import LANES, Ptx

NEAR, FAR, APART = 2**12, 2**40, 2**20  # of addresses
ONE = 1.0

type Program = Callable[[Ptx, list[Any]], list[str]]


def _signed(x: np.ndarray) -> np.ndarray:
    """As 32 bits with a sign."""
    return (np.asarray(x, np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def _float(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def run(*operands: np.ndarray) -> np.ndarray:
        given = [_signed(x).view(np.float32) for x in operands]
        return function(*given).astype(np.float32).view(np.int32)

    return run


def _warps(reduce: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda a, *_: np.repeat(reduce(_signed(a).reshape(-1, 32), axis=1), 32)


def _up(a: np.ndarray, distance: np.ndarray, *_: Any) -> np.ndarray:
    lane = np.arange(LANES)
    return a[np.where(lane % 32 >= distance, lane - distance, lane)]


OPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov.b32", "mov.u32", "mov.b64"), lambda a: a),
    "add.s32": operator.add,
    "sub.s32": operator.sub,
    "mul.lo.s32": operator.mul,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.wide.s32": lambda a, b, c: _signed(a).astype(np.int64) * b + c,
    "min.s32": np.minimum,
    "max.s32": np.maximum,
    "and.b32": operator.and_,
    "xor.b32": operator.xor,
    "bfe.u32": lambda a, first, count: a >> first & (1 << count) - 1,
    "shl.b32": operator.lshift,
    "shr.s32": operator.rshift,
    "popc.b32": lambda a: np.bitwise_count(_signed(a).view(np.uint32)),
    "setp.lt.s32": operator.lt,
    "setp.eq.s32": operator.eq,
    "and.pred": operator.and_,
    "selp.b32": lambda a, b, where: np.where(where, a, b),
    "redux.sync.max.s32": _warps(np.max),
    "redux.sync.min.s32": _warps(np.min),
    "shfl.sync.bfly.b32": lambda a, mask, *_: a[np.arange(LANES) ^ mask],
    "shfl.sync.up.b32": _up,
    "add.f32": _float(operator.add),
    "mul.f32": _float(operator.mul),
    "max.f32": _float(np.fmax),
    "fma.rn.f32": _float(lambda a, b, c: a * b + c),
    "ex2.approx.ftz.f32": _float(np.exp2),
    "rcp.approx.ftz.f32": _float(lambda a: ONE / a),
}


class Assembly:
    """Runs one program over arrays of 32-bit words, which it changes in place."""

    def __init__(self, arrays: Sequence[np.ndarray], far: Sequence[int]):
        self.words = [array.reshape(-1).view(np.int32) for array in arrays]
        self.bases = [(FAR if i in far else NEAR) + (i + 1) * APART for i in range(len(self.words))]
        self.far = far

    def run(self, program: Program, scalars: Sequence[int] = ()) -> list[np.ndarray]:
        """The registers that the program returns."""
        count = len(self.words)
        machine = Ptx(count + len(scalars), 0, self.far)
        named = program(machine, machine.inputs)
        given = [*self.bases, *scalars]
        self.registers = {f"${i}": np.full(LANES, x, np.int64) for i, x in enumerate(given)}
        self.registers["%tid.x"] = np.arange(LANES, dtype=np.int64)
        for line in machine.text([]).splitlines():
            if not line.startswith((".reg", "{", "}")):
                self._line(line.rstrip(";"))
        return [self.registers[name].astype(np.int32) for name in named]

    def _line(self, line: str) -> None:
        where = np.ones(LANES, bool)
        if line.startswith("@"):
            name, line = line.split(" ", 1)
            where = self._value(name[1:])
        op, rest = line.split(" ", 1)
        names = rest.split(", ")
        place = re.match(r"(ld|st|red)\.(global|shared)(\.or)?(?:\.v(\d))?\.b32", op)
        if place and place[4]:
            self._several(place[1] == "ld", place[2], int(place[4]), rest)
            return
        if place is None:
            made = OPS[op](*(self._value(name) for name in names[1:]))
            if not op.startswith(("setp", "and.pred", "mad.wide", "mov.b64")):
                made = _signed(made).astype(np.int64)
            self.registers[names[0]] = np.broadcast_to(made, (LANES,))
        elif place[1] == "ld":
            words, at = self._at(names[1], place[2], where)
            self.registers[names[0]] = words[at].astype(np.int64)
        else:
            words, at = self._at(names[0], place[2], where)
            value = np.broadcast_to(_signed(self._value(names[1])), (LANES,))[where]
            if place[1] == "red":
                np.bitwise_or.at(words, at[where], value)
            else:
                words[at[where]] = value

    def _several(self, loads: bool, space: str, count: int, rest: str) -> None:
        """Loads or stores 2 or 4 words at an address with an offset, which they divide."""
        listed = re.search(r"\{(.*)\}", rest)
        place = re.search(r"\[(\w+)\+(\d+)\]", rest)
        assert listed and place
        self.registers["place"] = self.registers[place[1]] + int(place[2])
        everywhere = np.ones(LANES, bool)
        words, at = self._at("place", space, everywhere)
        assert (self.registers["place"] % (4 * count) == 0).all()
        for i, name in enumerate(listed[1].split(", ")):
            if loads:
                self.registers[name] = words[at + i].astype(np.int64)
            else:
                words[at + i] = np.broadcast_to(_signed(self._value(name)), (LANES,))

    def _at(self, name: str, space: str, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The array that the lanes address, and where; lanes that do not take part are at 0."""
        address = self.registers[name.strip("[]")]
        if not where.any():
            return self.words[0], np.zeros(LANES, np.int64)
        index = int((address[where][0] % FAR - NEAR * (space == "shared")) // APART - 1)
        words, base = self.words[index], self.bases[index]
        assert (base >= FAR) == (space == "global")
        at = np.where(where, (address - base) // 4, 0)
        assert ((at >= 0) & (at < words.size)).all() and (address[where] % 4 == 0).all()
        return words, at

    def _value(self, name: str) -> Any:
        if name in self.registers:
            return self.registers[name]
        if name.startswith("0f"):
            return np.int64(struct.unpack(">i", bytes.fromhex(name[2:]))[0])
        return np.int64(int(name, 0))
