"""PTX that makes the tensor cores' operand of 16 bits of numbers of 8: a lane's registers of 64
rows x some columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class _Type(NamedTuple):
    """A 16-bit float.

    Attributes:
        pair: its pair type.
        ones: a pair of numbers whose lowest bits count by ones.
        right: how far the bits of an e4m3 number beside its sign are moved to their places.
        bits: a mask of these places.
        factor: a pair of what such numbers are to be multiplied with, then.
    """

    pair: str
    ones: int
    right: int
    bits: int
    factor: int


_TYPES = {
    "bfloat16": _Type("bf16x2", 0x43004300, 4, 0x07F007F0, 0x7B807B80),  # 128, 2 ** 120
    "float16": _Type("f16x2", 0x64006400, 1, 0x3F803F80, 0x5C005C00),  # 1024, 2 ** 8
}


def conversion(first: int, columns: int, groups: int, dtype: str, integers: bool) -> str:
    """Assembly with the outputs first, `columns // 4` registers, then the address of 64 rows of 128
    bytes, swizzled as the copy engine leaves them, then for each group the scales of rows g and
    g + 8, float32.

    A register is two neighbouring columns of one row. For each 16 columns: row g, row g + 8, and
    both 8 columns further. Numbers of 8 bits are exact in 16; those that have scales are multiplied
    in float32 and rounded once.

    Args:
        first, columns: The columns of the rows, multiples of 16.
        groups: Groups of columns that share a scale; 0 for numbers without scales.
        dtype: "bfloat16" or "float16".
        integers: Numbers are int8, not float8_e4m3fn.
    """
    return "\n".join(["{", *_lines(first, columns, groups, dtype, integers), "}"])


def _lines(first: int, columns: int, groups: int, dtype: str, integers: bool) -> Iterator[str]:
    outputs = columns // 4
    wide = _TYPES[dtype]
    yield ".reg .b32 lane, row, at, place, magic, bits, part, low, high, w<4>;"
    # Results may take the registers of operands
    yield f".reg .b16 h<2>;\n.reg .b32 s<{2 * groups + 1}>;\nmov.b32 at, ${outputs};"
    yield from (f"mov.b32 s{i}, ${outputs + 1 + i};" for i in range(2 * groups))
    yield f"mov.b32 magic, {wide.ones if integers else wide.factor:#x};"
    yield "mov.u32 lane, %tid.x;\nand.b32 lane, lane, 127;"
    # Row 16 · warp + g, 128 bytes each; columns 2c; sixteen bytes are where the row's number says
    yield "shr.u32 row, lane, 5;\nmad.lo.u32 at, row, 2048, at;"
    yield "shr.u32 row, lane, 2;\nand.b32 row, row, 7;\nmad.lo.u32 at, row, 144, at;"
    yield "and.b32 row, lane, 3;\nmad.lo.u32 at, row, 2, at;"
    for step in range(columns // 16):
        yield f"xor.b32 place, at, {first + 16 * step};"
        for r, offset in enumerate((0, 1024, 8, 1032)):
            yield f"ld.shared.u16 w{r}, [place+{offset}];"
        for r in range(4):
            out = f"${4 * step + r}"
            yield from (_integers if integers else _floats)(r, wide, "bits" if groups else out)
            if groups:
                yield from _scaled(out, wide, f"s{2 * (16 * step * groups // columns) + r % 2}")


def _integers(r: int, wide: _Type, out: str) -> Iterator[str]:
    """A number is its lower seven bits less 128 times the eighth, both as the lowest bits of 128
    (1024 in float16): the difference is exact."""
    yield f"prmt.b32 bits, w{r}, 0, 0x4140;\nlop3.b32 part, bits, 0x007f007f, magic, 0xea;"
    yield f"lop3.b32 bits, bits, 0x00800080, magic, 0xea;\nsub.rn.{wide.pair} {out}, part, bits;"


def _floats(r: int, wide: _Type, out: str) -> Iterator[str]:
    """A float's bits in the places of a wider one's are a power of two less."""
    yield f"prmt.b32 bits, w{r}, 0, 0x1404;\nshr.u32 part, bits, {wide.right};"
    yield f"and.b32 part, part, {wide.bits:#010x};\nlop3.b32 bits, bits, 0x80008000, part, 0xea;"
    yield f"mul.rn.{wide.pair} {out}, bits, magic;"


def _scaled(out: str, wide: _Type, scale: str) -> Iterator[str]:
    if wide.pair == "bf16x2":
        yield "shl.b32 low, bits, 16;\nand.b32 high, bits, 0xffff0000;"
    else:
        yield "mov.b32 {h0, h1}, bits;\ncvt.f32.f16 low, h0;\ncvt.f32.f16 high, h1;"
    yield f"mul.rn.f32 low, low, {scale};\nmul.rn.f32 high, high, {scale};"
    yield f"cvt.rn.{wide.pair}.f32 {out}, high, low;"
