"""PTX that makes the tensor cores' operand of 4-bit words: a lane's registers of 64 rows x some
columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_matmul.packed import FP4, TABLES

_PAIRS = {"bfloat16": "bf16x2", "float16": "f16x2"}
_NUMBERS = 0x000F000F  # of a register, its lowest


class _Integers(NamedTuple):
    """How 4-bit integers become 16-bit floats, of which zero points are taken in the same step. All
    constants are pairs.

    Attributes:
        magic: what is set beside a number's bits, so that they are a float.
        lifts: what floats of numbers at the lowest bits, and of those 4 bits up, are multiplied
            with, that they count by ones, times one over `factor`.
        unit, base: zero points are multiplied with the one, and the other is added.
        middle: what becomes of a zero point of 8.
        factor: of scales.
    """

    magic: int
    lifts: tuple[int, ...]
    unit: int
    base: int
    middle: int
    factor: int | None


# Without magic, numbers of bfloat16 are its smallest: they count by 2 ** -133, those 4 bits up by
# 2 ** -129, and even 15 of these are in line. Magic 1024 in float16 has room for one place.
_INTEGERS = {
    "bfloat16": _Integers(
        magic=0,
        lifts=(0x7F007F00, 0x7D007D00),  # 2 ** 127, 2 ** 123
        unit=0xBC80BC80,  # - 2 ** -6
        base=0,
        middle=0xBE00BE00,  # - 8 * 2 ** -6
        factor=0x42804280,  # 2 ** 6
    ),
    "float16": _Integers(
        magic=0x64006400,
        lifts=(0x3C003C00,),  # 1
        unit=0xBC00BC00,  # - 1
        base=0xE400E400,  # - 1024
        middle=0xE408E408,  # - 1032
        factor=None,
    ),
}


class _Floats(NamedTuple):
    """How 4-bit floats become 16-bit ones: their bits are moved to the same places of a float,
    which then is 2 ** -126 (float16: 2 ** -14) of the value.

    Attributes:
        sign, rest: how far bits are moved to the left.
        signs, rests: masks of both numbers of a register.
        factor: of scales, twice; with `EXCESS` left in the product.
    """

    sign: int
    rest: int
    signs: int
    rests: int
    factor: int


_FLOATS = {
    "bfloat16": _Floats(12, 6, 0x80008000, 0x01C001C0, 0x5F805F80),  # 2 ** 64
    "float16": _Floats(12, 9, 0x80008000, 0x0E000E00, 0x74007400),  # 2 ** 14
}
# What products with 4-bit floats are still to be multiplied with: all of 2 ** 126 would make
# infinities of scales from 4 on
EXCESS = {"bfloat16": 2.0**62, "float16": 1.0}


def conversion(columns: int, group: int, dtype: str, form: str) -> str:
    """Assembly with the outputs first, `columns // 4` registers, then the addresses of a slot's
    words, of its scales and, in their shape, of its zero points or offsets.

    A register is two neighbouring columns of one row. For each 16 columns: row g, row g + 8, and
    both 8 columns further. Register r of a word has its numbers in nibbles r and r + 4. They are
    floats once masked, and differences with zero points are exact.

    Args:
        columns: Columns of the slot, a multiple of 64.
        group: Columns of a scale, at most `columns`.
        form: one of `packed.FORMS` or of `packed.TABLES`.
    """
    outputs = columns // 4
    return "\n".join(["{", *_lines(columns, group, dtype, form, outputs), "}"])


def _lines(columns: int, group: int, dtype: str, form: str, outputs: int) -> Iterator[str]:
    pair_type = _PAIRS[dtype]
    integers = _INTEGERS[dtype]
    others = form in ("zeros", "offsets")
    floats = None
    if form == FP4:
        floats = _FLOATS[dtype]
    is_table = form in TABLES and not floats
    yield ".reg .b32 lane, row, at, pair, bits, sign, moved, magic, unit, base, factor;"
    yield ".reg .b32 from<3>, w<4>, s<2>, z<2>, o<2>, lift<2>;"
    # Results may take the registers of operands
    yield from (f"mov.b32 from{i}, ${outputs + i};" for i in range(2 + others))
    yield "mov.u32 lane, %tid.x;\nand.b32 lane, lane, 127;\nshr.u32 row, lane, 2;"
    if is_table:
        factor = None
        yield from _table(form, dtype)
    elif floats:
        factor = floats.factor
    else:
        factor = integers.factor
        yield from _constants(integers, form)
    if factor is not None:
        yield f"mov.b32 factor, {factor:#x};"
    for step in range(columns // 16):
        if step % 4 == 0:  # the four words of a lane are neighbours
            yield "mad.lo.u32 at, lane, 16, from0;"
            yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, [at+{512 * step}];"
        if 16 * step % group == 0:
            place = 128 * (16 * step // group)
            yield from _two_rows("s", "from1", place)
            if others:
                yield from _two_rows(form[0], "from2", place)
            if form == "zeros":
                yield from (f"fma.rn.{pair_type} z{row}, z{row}, unit, base;" for row in range(2))
            if factor is not None:
                yield from (f"mul.rn.{pair_type} s{row}, s{row}, factor;" for row in range(2))
        if floats:
            yield from _float_word(step, pair_type, floats)
        elif is_table:
            yield from _table_word(step, pair_type)
        else:
            yield from _word(step, pair_type, form, integers)


def _constants(integers: _Integers, form: str) -> Iterator[str]:
    """Registers of what integers are made with."""
    yield f"mov.b32 magic, {integers.magic:#x};"
    yield from (f"mov.b32 lift{i}, {lift:#x};" for i, lift in enumerate(integers.lifts))
    yield f"mov.b32 unit, {integers.unit:#x};\nmov.b32 base, {integers.base:#x};"
    if form == "offsets":
        zero = integers.base
    else:
        zero = integers.middle
    yield f"mov.b32 z0, {zero:#x};\nmov.b32 z1, z0;"


def _two_rows(name: str, address: str, place: int) -> Iterator[str]:
    """Load two rows' numbers, which are neighbours, each into both halves of a register."""
    yield f"mad.lo.u32 at, row, 4, {address};\nld.shared.b32 pair, [at+{place}];"
    yield f"prmt.b32 {name}0, pair, pair, 0x1010;\nprmt.b32 {name}1, pair, pair, 0x3232;"


def _word(step: int, pair_type: str, form: str, integers: _Integers) -> Iterator[str]:
    """The four registers of a word, (number - zero point) · scale or number · scale + offset."""
    places = len(integers.lifts)
    for r in range(4):
        out = f"${4 * step + r}"
        row = r % 2
        place = r % places
        if place == 0:
            yield f"shr.u32 moved, w{step % 4}, {4 * r};"
        # (moved & mask) | magic
        yield f"lop3.b32 bits, moved, {_NUMBERS << 4 * place:#010x}, magic, 0xea;"
        yield f"fma.rn.{pair_type} bits, bits, lift{place}, z{row};"
        if form == "offsets":
            yield f"fma.rn.{pair_type} {out}, bits, s{row}, o{row};"
        else:
            yield f"mul.rn.{pair_type} {out}, bits, s{row};"


def _float_word(step: int, pair_type: str, floats: _Floats) -> Iterator[str]:
    """The four registers of a word of 4-bit floats: each with its bits in a float's places, times
    its scale."""
    for r in range(4):
        for name, left in (("sign", floats.sign - 4 * r), ("bits", floats.rest - 4 * r)):
            way = "shr"
            if left >= 0:
                way = "shl"
            yield f"{way}.{'b' if left >= 0 else 'u'}32 {name}, w{step % 4}, {abs(left)};"
        yield f"and.b32 bits, bits, {floats.rests:#010x};"
        yield f"lop3.b32 bits, sign, {floats.signs:#010x}, bits, 0xea;"  # (sign & mask) | bits
        yield f"mul.rn.{pair_type} ${4 * step + r}, bits, s{r % 2};"


def _table(form: str, dtype: str) -> Iterator[str]:
    """Sixteen values in registers: their low bytes in t0 to t3, their high ones in t4 to t7."""
    yield ".reg .b32 t<8>, from_bit<2>, picked<2>, beyond, first, last, byte<2>, p<4>;"
    values = np.array(TABLES[form]).astype(jnp.dtype(dtype))
    both = values.view(np.uint8).reshape(16, 2).T.copy().view(np.uint32).reshape(-1)
    yield from (f"mov.b32 t{i}, {int(word):#x};" for i, word in enumerate(both))


def _table_word(step: int, pair_type: str) -> Iterator[str]:
    """The four registers of a word, what its numbers stand for times their scales. A byte is picked
    of eight by three bits of a number, and of both halves of the table by the fourth."""
    word = f"w{step % 4}"
    yield f"and.b32 picked0, {word}, 0x77777777;\nshr.u32 picked1, picked0, 16;"
    yield f"shr.u32 from_bit0, {word}, 3;\nand.b32 from_bit0, from_bit0, 0x11111111;"
    yield "shr.u32 from_bit1, from_bit0, 16;"
    for side in range(2):  # numbers 0 to 3 and 4 to 7: the left and the right ones of pairs
        yield f"prmt.b32 beyond, 0xff00, 0, from_bit{side};"
        for i in range(2):
            low = 4 * i
            high = 4 * i + 2
            yield f"prmt.b32 first, t{low}, t{low + 1}, picked{side};"
            yield f"prmt.b32 last, t{high}, t{high + 1}, picked{side};"
            yield f"lop3.b32 byte{i}, beyond, last, first, 0xca;"  # beyond ? last : first
        yield f"prmt.b32 p{2 * side}, byte0, byte1, 0x5140;"
        yield f"prmt.b32 p{2 * side + 1}, byte0, byte1, 0x7362;"
    for r in range(4):
        yield f"prmt.b32 bits, p{r // 2}, p{2 + r // 2}, {(0x5410, 0x7632)[r % 2]:#x};"
        yield f"mul.rn.{pair_type} ${4 * step + r}, bits, s{r % 2};"
