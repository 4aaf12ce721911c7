"""PTX that makes the tensor cores' operand of 4-bit words: a lane's registers of 64 rows x some
columns."""

from __future__ import annotations

from collections.abc import Iterator

# 16-bit float → its pair type, and a pair of numbers whose lowest bits count by ones
_PAIRS = {"bfloat16": ("bf16x2", 0x43004300), "float16": ("f16x2", 0x64006400)}
_MIDDLE = 0x00080008


def conversion(columns: int, group: int, dtype: str, form: str) -> str:
    """Assembly with the outputs first, `columns // 4` registers, then the addresses of a slot's
    words, of its scales and, in their shape, of its zero points or offsets.

    A register is two neighbouring columns of one row. For each 16 columns: row g, row g + 8, and
    both 8 columns further. Register r of a word has its numbers in nibbles r and r + 4. As the
    lowest bits of 128 (1024 in float16) they are floats already, and differences are exact.

    Args:
        columns: Columns of the slot, a multiple of 64.
        group: Columns of a scale, at most `columns`.
        form: "symmetric", "zeros" or "offsets".
    """
    outputs = columns // 4
    return "\n".join(["{", *_lines(columns, group, dtype, form, outputs), "}"])


def _lines(columns: int, group: int, dtype: str, form: str, outputs: int) -> Iterator[str]:
    kind, magic = _PAIRS[dtype]
    zero = magic if form == "offsets" else magic | _MIDDLE
    yield ".reg .b32 lane, row, at, pair, bits, magic, from<3>, w<4>, s<2>, z<2>, o<2>;"
    # Results may take the registers of operands
    yield from (f"mov.b32 from{i}, ${outputs + i};" for i in range(2 + (form != "symmetric")))
    yield "mov.u32 lane, %tid.x;\nand.b32 lane, lane, 127;\nshr.u32 row, lane, 2;"
    yield f"mov.b32 magic, {magic:#x};\nmov.b32 z0, {zero:#x};\nmov.b32 z1, z0;"
    for step in range(columns // 16):
        if step % 4 == 0:  # the four words of a lane are neighbours
            yield "mad.lo.u32 at, lane, 16, from0;"
            yield f"ld.shared.v4.b32 {{w0, w1, w2, w3}}, [at+{512 * step}];"
        if 16 * step % group == 0:
            place = 128 * (16 * step // group)
            yield from _two_rows("s", "from1", place)
            if form != "symmetric":
                yield from _two_rows(form[0], "from2", place)
            if form == "zeros":
                yield from (f"add.rn.{kind} z{row}, z{row}, magic;" for row in range(2))
        yield from _word(step, kind, form)


def _two_rows(name: str, address: str, place: int) -> Iterator[str]:
    """Load two rows' numbers, which are neighbours, each into both halves of a register."""
    yield f"mad.lo.u32 at, row, 4, {address};\nld.shared.b32 pair, [at+{place}];"
    yield f"prmt.b32 {name}0, pair, pair, 0x1010;\nprmt.b32 {name}1, pair, pair, 0x3232;"


def _word(step: int, kind: str, form: str) -> Iterator[str]:
    """The four registers of a word, (number - zero point) · scale or number · scale + offset."""
    for r in range(4):
        out, row = f"${4 * step + r}", r % 2
        yield f"shr.u32 bits, w{step % 4}, {4 * r};"
        yield "lop3.b32 bits, bits, 0x000f000f, magic, 0xea;"  # (bits & mask) | magic
        yield f"sub.rn.{kind} bits, bits, z{row};"
        if form == "offsets":
            yield f"fma.rn.{kind} {out}, bits, s{row}, o{row};"
        else:
            yield f"mul.rn.{kind} {out}, bits, s{row};"
