"""The machine that writes a lane program down as PTX."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection
from typing import Any

LANES = 128  # of a warpgroup
_CVT = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
_PAIR = {"float16": "f16x2", "bfloat16": "bf16x2"}


def _instruction(op: str) -> Callable[..., str]:
    """A method that is one instruction, from its operands to a new register."""

    def method(self: Ptx, *operands: Any) -> str:
        return self._make(op, *operands)

    return method


class Ptx:
    """Writes a program down. Inputs are named when it begins, those in `far` are addresses in
    device memory; `text` gives the assembly with the outputs moved to where LLVM wants them."""

    def __init__(self, inputs: int, outputs: int, far: Collection[int] = ()):
        self._lines: list[str] = []
        self._count = 0
        self._outputs = outputs
        self.inputs = []
        for i in range(inputs):
            operand = f"${outputs + i}"
            if i in far:
                name = self._far("mov.b64", operand)
            else:
                name = self._make("mov.b32", operand)
            self.inputs.append(name)
        lane = self._make("mov.u32", "%tid.x")
        self.g = self._make("bfe.u32", lane, 2, 3)
        self.c = self._make("and.b32", lane, 3)
        self.warp = self._make("bfe.u32", lane, 5, 2)

    def text(self, outputs: list[str]) -> str:
        assert len(outputs) == self._outputs
        moves = [f"mov.b32 ${i}, {name};" for i, name in enumerate(outputs)]
        registers = [
            f".reg .b32 r<{self._count + 1}>;",
            f".reg .b16 h<{2 * self._count + 2}>;",
            f".reg .pred p<{self._count + 1}>;",
        ]
        if any(name.startswith("q") for name in self.inputs):
            registers.append(f".reg .b64 q<{self._count + 1}>;")
        return "\n".join(["{", *registers, *self._lines, *moves, "}"])

    @functools.cached_property
    def lane(self) -> str:
        """The lane's number in its warp."""
        return self.add(self.times(self.g, 4), self.c)

    def _name(self) -> int:
        self._count += 1
        return self._count

    def _emit(self, op: str, *arguments: Any) -> None:
        self._lines.append(f"{op} {', '.join(_immediate(a) for a in arguments)};")

    def _make(self, op: str, *arguments: Any) -> str:
        name = f"r{self._name()}"
        self._emit(op, name, *arguments)
        return name

    def _far(self, op: str, *arguments: Any) -> str:
        name = f"q{self._name()}"
        self._emit(op, name, *arguments)
        return name

    constant = _instruction("mov.b32")
    add = _instruction("add.s32")
    subtract = _instruction("sub.s32")
    times = _instruction("mul.lo.s32")
    imax = _instruction("max.s32")
    imin = _instruction("min.s32")
    left = _instruction("shl.b32")
    right = _instruction("shr.s32")  # keeps the sign
    band = _instruction("and.b32")
    flip = _instruction("xor.b32")
    ones = _instruction("popc.b32")
    # Some bits of a number that is not negative: the first, and how many
    bits = _instruction("bfe.u32")
    fadd = _instruction("add.f32")
    fmul = _instruction("mul.f32")
    fma = _instruction("fma.rn.f32")
    fmax = _instruction("max.f32")
    exp2 = _instruction("ex2.approx.ftz.f32")
    log2 = _instruction("lg2.approx.ftz.f32")
    tanh = _instruction("tanh.approx.f32")
    reciprocal = _instruction("rcp.approx.ftz.f32")
    # The 8 x 8 matrix of 16-bit numbers whose row g, columns 2c and 2c + 1 lane (g, c) holds,
    # transposed
    transpose = _instruction("movmatrix.sync.aligned.m8n8.trans.b16")

    def below(self, a: Any, b: Any) -> str:
        name = f"p{self._name()}"
        self._emit("setp.lt.s32", name, a, b)
        return name

    def equal(self, a: Any, b: Any) -> str:
        name = f"p{self._name()}"
        self._emit("setp.eq.s32", name, a, b)
        return name

    def both(self, a: str, b: str) -> str:
        name = f"p{self._name()}"
        self._emit("and.pred", name, a, b)
        return name

    def select(self, predicate: str, a: Any, b: Any) -> str:
        return self._make("selp.b32", a, b, predicate)

    def shuffle(self, a: Any, mask: int) -> str:
        """The value of the lane whose number differs in these bits."""
        return self._make("shfl.sync.bfly.b32", a, mask, 31, "0xffffffff")

    def warp_max(self, a: Any) -> str:
        """The largest integer of the warp."""
        return self._make("redux.sync.max.s32", a, "0xffffffff")

    def warp_min(self, a: Any) -> str:
        """The smallest integer of the warp."""
        return self._make("redux.sync.min.s32", a, "0xffffffff")

    def lower(self, a: Any, distance: int) -> str:
        """The value of the lane that is `distance` below in the warp; lanes without one get their
        own."""
        return self._make("shfl.sync.up.b32", a, distance, 0, "0xffffffff")

    def as_integer(self, a: str) -> str:
        """The bits of a float."""
        return a

    def as_float(self, a: str) -> str:
        """The float of these bits."""
        return a

    def word(self, words: str, index: Any) -> str:
        """The `index`-th 32-bit word of a plain array."""
        return self._make(f"ld.{self._space(words)}.b32", f"[{self._place(words, index)}]")

    def words(self, words: str, index: Any, count: int, after: int = 0) -> list[str]:
        """The 2 or 4 words from the `at + after`-th on, which is a multiple of so many."""
        place = self._place(words, index)
        out = [f"r{self._name()}" for _ in range(count)]
        self._lines.append(
            f"ld.{self._space(words)}.v{count}.b32 {{{', '.join(out)}}}, [{place}+{4 * after}];"
        )
        return out

    def put_words(self, words: str, index: Any, values: list[Any], after: int = 0) -> None:
        """2 or 4 words to a plain array, from the `at + after`-th on. Lanes that write to one place
        write the same."""
        place = self._place(words, index)
        operands = ", ".join(map(_immediate, values))
        self._lines.append(
            f"st.{self._space(words)}.v{len(values)}.b32 [{place}+{4 * after}], {{{operands}}};"
        )

    def put_word(self, words: str, index: Any, value: Any, where: str) -> None:
        """A word to a plain array, from the lanes `where` this holds."""
        place = self._place(words, index)
        self._lines.append(f"@{where} st.{self._space(words)}.b32 [{place}], {_immediate(value)};")

    def or_word(self, words: str, index: Any, value: Any, where: str) -> None:
        """Adds bits to a word of a plain array, from the lanes `where` this holds."""
        place = self._place(words, index)
        self._lines.append(
            f"@{where} red.{self._space(words)}.or.b32 [{place}], {_immediate(value)};"
        )

    def _space(self, words: str) -> str:
        return "global" if words.startswith("q") else "shared"

    def _place(self, words: str, index: Any) -> str:
        if words.startswith("q"):
            return self._far("mad.wide.s32", index, 4, words)
        return self._make("mad.lo.s32", index, 4, words)

    def bytes_of(self, a: Any, b: Any, selector: int) -> str:
        """Four bytes of two registers, each named by 4 bits: 0 to 3 of `a`, 4 to 7 of `b`, the
        lowest first."""
        return self._make("prmt.b32", a, b, f"0x{selector:x}")

    def floats(self, a: Any, dtype: str) -> tuple[str, str]:
        """Four 8-bit floats as two pairs of float16."""
        name = self._name()
        self._lines.append(f"mov.b32 {{h{2 * name}, h{2 * name + 1}}}, {a};")
        low, high = (
            self._make(f"cvt.rn.f16x2.{_CVT[dtype]}", f"h{2 * name + i}") for i in range(2)
        )
        return low, high

    def pair(self, low: Any, high: Any, dtype: str = "float16") -> str:
        """Two floats rounded to 16 bits in one register."""
        return self._make(f"cvt.rn.{_PAIR[dtype]}.f32", high, low)

    def clamped(self, low: Any, high: Any) -> str:
        """Two floats rounded to float16, within its range; NaN stays."""
        return self._make("cvt.rn.satfinite.f16x2.f32", high, low)

    def halves(self, a: Any) -> tuple[str, str]:
        """A pair of float16 as two floats."""
        name = self._name()
        self._lines.append(f"mov.b32 {{h{2 * name}, h{2 * name + 1}}}, {a};")
        return self._make("cvt.f32.f16", f"h{2 * name}"), self._make(
            "cvt.f32.f16", f"h{2 * name + 1}"
        )

    def wide(self, a: Any) -> tuple[str, str]:
        """A pair of bfloat16 as two floats."""
        return self._make("shl.b32", a, 16), self._make("and.b32", a, "0xffff0000")

    def multiply(self, acc: list[str], a: list[str], b: list[str]) -> list[str]:
        """acc + a·b of matrices 16 x 16 and 16 x 8 in float16, the sum 16 x 8 in float32."""
        out = [f"r{self._name()}" for _ in range(4)]
        listed = ", ".join("{" + ", ".join(x) + "}" for x in (out, a, b, acc))
        self._lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {listed};")
        return out

    def offset(self, width: int, row: Any, sub: Any, chunk: Any, piece: int = 0) -> str:
        """Where in a tile of rows of `width` bytes, swizzled, byte `sub` of a 16-byte chunk of a
        row lies. Chunks count within the `piece`-th piece of the row."""
        wide = min(width, 128)
        within = self._make("mul.lo.s32", self._make("and.b32", row, 7), wide)
        flip = self._make("and.b32", self._make("shr.u32", within, 3), wide - 16)
        moved = self._make(
            "xor.b32",
            flip,
            16 * chunk if isinstance(chunk, int) else self._make("shl.b32", chunk, 4),
        )
        start = self._make("mad.lo.s32", self._make("shr.u32", row, 3), 8 * width, within)
        return self.add(self.add(start, self.add(moved, sub)), 8 * wide * piece)

    def load(self, tile: tuple[str, int], offset: Any, down: int = 0) -> str:
        """The 4 bytes at an offset of a tile (address, bytes of a row), or of the row that is 8 ·
        `down` below."""
        return self._make("ld.shared.b32", f"[{self.add(tile[0], offset)}+{8 * down * tile[1]}]")

    def store(
        self, tile: tuple[str, int], offset: Any, values: list[str], dtype: str, down: int = 0
    ) -> None:
        """Four floats as 16-bit numbers, to the 8 bytes at an offset."""
        words = ", ".join(self.pair(values[i], values[i + 1], dtype) for i in (0, 2))
        self._lines.append(
            f"st.shared.v2.b32 [{self.add(tile[0], offset)}+{8 * down * tile[1]}], {{{words}}};"
        )

    def scale(self, scales: tuple[str, int], side: int, token: Any, after: int = 0) -> str:
        """The bfloat16 at `[side, token + after]` of a plain array (address, row length) as a
        float."""
        address, width = scales
        pointer = self._make("mad.lo.s32", token, 2, address)
        name = self._name()
        self._lines.append(f"ld.shared.b16 h{2 * name}, [{pointer}+{2 * (side * width + after)}];")
        self._lines.append(f"mov.b32 r{name}, {{0, h{2 * name}}};")
        return f"r{name}"

    def queries(self, rows: tuple[str, int], row: Any, column: Any) -> list[str]:
        """Four 16-bit numbers from `column` on of a row of a plain array (address, row length), as
        two registers."""
        address, width = rows
        pointer = self._make(
            "mad.lo.s32", column, 2, self._make("mad.lo.s32", row, 2 * width, address)
        )
        out = [f"r{self._name()}" for _ in range(2)]
        self._lines.append(f"ld.shared.v2.b32 {{{', '.join(out)}}}, [{pointer}];")
        return out

    def put(self, numbers: tuple[str, int], place: Any, value: Any) -> None:
        """A float to a place of a plain array (address, length)."""
        self._emit("st.shared.b32", f"[{self._make('mad.lo.s32', place, 4, numbers[0])}]", value)


def _immediate(x: Any) -> str:
    if isinstance(x, float):
        return f"0f{struct.pack('>f', x).hex().upper()}"
    return str(x)
