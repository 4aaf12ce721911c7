"""How a row is exchanged, as PTX of one thread.

A word is its own flag: a place in an inbox holds `NEVER` until a peer stores something else there.
So there are no barriers, fences or atomics, and ordinary stores carry everything:

- `opening` counts the exchanges of a row; the count says which of two places comes next.
- `putting` stores a thread's words into a device's inbox. A word that is `NEVER` goes as 0; as two
  16-bit floats it is (0, -0), so that changes no sum.
- `taking` polls the own inbox until every word is there, and puts `NEVER` back.

Why a place is free when it comes again: a device stores there for exchange n + 2 in a kernel that
starts after its kernel of exchange n + 1 of the same row has ended. That one ended because this
peer's words came, which the peer sent after its kernel of exchange n had ended, and so after it had
put `NEVER` back.

Waiting is bounded. A thread that waited in vain raises the word that all threads of its device
read before they wait, and the device's word in the host's memory. From then on nobody waits, sums
are wrong, and the host must fail the step and fill the inboxes anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pallas_kernels.all_reduce.group import LANES, WORD, Layout

NEVER = -(2**31)
HEX = "0x80000000"
RAISED = 1
# The table of a device, int32: its rank, polls before it gives up, the address of its error word on
# the host, and the addresses of all inboxes, its own first, then those of the ranks after it
RANK = 0
POLLS = 1
ERROR = 2
INBOXES = 4
TABLE = 32


@dataclass(frozen=True)
class Region:
    """Where the rows of one kind of exchange lie in an inbox, in bytes.

    Attributes:
        start: of the first row's first place.
        record: from a row to the next.
        place: from a row's first place to its second one.
        slot: from a sender's row to the next one; 0 where there is one sender.
    """

    start: int
    record: int
    place: int
    slot: int = 0

    @staticmethod
    def one_shot(layout: Layout) -> Region:
        """Rows that every device sends to every other one."""
        place = layout.slots * layout.row
        slot = layout.row if layout.slots > 1 else 0
        return Region(layout.header + layout.counters, layout.one_shot_record, place, slot)

    @staticmethod
    def parts(layout: Layout) -> Region:
        """Rows that every device sends to their owner, which numbers its own."""
        return Region(layout.parts, layout.part_record, layout.slots * layout.row, layout.row)

    @staticmethod
    def totals(layout: Layout) -> Region:
        """Rows that their owner sends to every device."""
        return Region(layout.totals + layout.counters, layout.total_record, layout.row)


def opening(counters: int, record: int) -> str:
    """Results: the place, 0 or 1. Operands: own inbox, row. Counters of row 0 are at `counters`."""
    return _block(
        [
            ".reg .b64 at, wide;",
            ".reg .b32 lane, count, next;",
            "mov.u32 lane, %tid.x;",
            f"mul.wide.u32 at, $2, {record};",
            "add.s64 at, at, $1;",
            f"mul.wide.u32 wide, lane, {WORD};",
            "add.s64 at, at, wide;",
            f"add.s64 at, at, {counters};",
            "ld.global.b32 count, [at];",
            "add.s32 next, count, 1;",
            "st.global.b32 [at], next;",
            "and.b32 $0, count, 1;",
        ]
    )


def putting(words: int, vector: int, region: Region) -> str:
    """No results. Operands: table, receiver (0: oneself, 1: the next rank …), row, place, words."""
    lines = [
        ".reg .b64 at, wide;",
        ".reg .b32 lane, rank, " + ", ".join(f"s{i}" for i in range(vector)) + ";",
        ".reg .pred p;",
        "mul.wide.u32 wide, $1, 8;",
        "add.s64 wide, wide, $0;",
        f"ld.global.b64 at, [wide+{INBOXES * WORD}];",
        *_to_row(region, "$2", "$3", vector),
    ]
    if region.slot:
        lines += [
            f"ld.global.b32 rank, [$0+{RANK * WORD}];",
            f"mul.wide.u32 wide, rank, {region.slot};",
            "add.s64 at, at, wide;",
        ]
    for group, place in _groups(range(4, 4 + words), vector):
        for i, word in enumerate(group):
            lines += [f"setp.eq.b32 p, ${word}, {HEX};", f"selp.b32 s{i}, 0, ${word}, p;"]
        lines.append(_store(place, [f"s{i}" for i in range(vector)]))
    return _block(lines)


def taking(words: int, vector: int, region: Region, slots: Sequence[int]) -> str:
    """Results: the words of each of these slots. Operands: own inbox, table, row, place."""
    count = words * len(slots)
    inbox, table, row, place = (f"${count + i}" for i in range(4))
    taken = [f"o{i}" for i in range(count)]
    groups = [
        (group, slot * region.slot + offset)
        for i, slot in enumerate(slots)
        for group, offset in _groups(taken[i * words : (i + 1) * words], vector)
    ]
    return _block(
        [
            ".reg .b64 at, wide, error;",
            ".reg .b32 lane, left, raised, never, " + ", ".join(taken) + ";",
            ".reg .pred p, q;",
            f"mov.b64 at, {inbox};",
            *_to_row(region, row, place, vector),
            f"ld.relaxed.sys.global.b32 raised, [{inbox}];",
            f"ld.global.b32 left, [{table}+{POLLS * WORD}];",
            f"setp.eq.s32 q, raised, {RAISED};",
            "selp.b32 left, 1, left, q;",
            "AGAIN:",
            *(_load(offset, group) for group, offset in groups),
            f"setp.eq.b32 p, {taken[0]}, {HEX};",
            *(f"setp.eq.or.b32 p, {name}, {HEX}, p;" for name in taken[1:]),
            "add.s32 left, left, -1;",
            "setp.gt.and.s32 q, left, 0, p;",
            "@q bra AGAIN;",
            f"@p ld.global.b64 error, [{table}+{ERROR * WORD}];",
            f"@p st.relaxed.sys.global.b32 [error], {RAISED};",
            f"@p st.relaxed.sys.global.b32 [{inbox}], {RAISED};",
            f"mov.b32 never, {HEX};",
            *(_store(offset, ["never"] * vector) for _, offset in groups),
            *(f"mov.b32 ${i}, {name};" for i, name in enumerate(taken)),
        ]
    )


def _to_row(region: Region, row: str, place: str, vector: int) -> Iterator[str]:
    """Move `at` from an inbox's beginning to this thread's words of a row."""
    yield "mov.u32 lane, %tid.x;"
    sizes = ((row, region.record), (place, region.place), ("lane", vector * WORD))
    for name, size in sizes:
        yield f"mul.wide.u32 wide, {name}, {size};"
        yield "add.s64 at, at, wide;"
    yield f"add.s64 at, at, {region.start};"


def _groups[T](words: Sequence[T], vector: int) -> Iterator[tuple[Sequence[T], int]]:
    """Words that are accessed at once, and their distance in bytes from the thread's first ones."""
    for i in range(0, len(words), vector):
        yield words[i : i + vector], i * LANES * WORD


def _store(place: int, names: Sequence[str]) -> str:
    return f"st.relaxed.sys.global{_width(names)}.b32 [at+{place}], {{{', '.join(names)}}};"


def _load(place: int, names: Sequence[str]) -> str:
    return f"ld.relaxed.sys.global{_width(names)}.b32 {{{', '.join(names)}}}, [at+{place}];"


def _width(names: Sequence[str]) -> str:
    if len(names) > 1:
        return f".v{len(names)}"
    return ""


def _block(lines: Sequence[str]) -> str:
    return "\n".join(["{", *lines, "}"])
