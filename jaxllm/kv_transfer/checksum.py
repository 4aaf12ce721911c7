"""A fast checksum of a page: it finds damage, not forgery."""

from __future__ import annotations

import zlib

import numpy as np

ROW = 4096  # bytes


def checksum(page: np.ndarray) -> int:
    """64 bits of a page, uint8 `[bytes]`.

    Rows of 4 KiB are added up as 64-bit words, column by column, at the speed of memory; the sums,
    what follows the last whole row, and the length go through two cyclic checks. So every change
    of one word shows, and every exchange of words of different columns.
    """
    whole = len(page) // ROW * ROW
    sums = page[:whole].view("<u8").reshape(-1, ROW // 8).sum(0, dtype="<u8")
    low = zlib.crc32(page[whole:].tobytes(), zlib.crc32(sums.tobytes(), len(page)))
    return zlib.adler32(sums.tobytes(), low & 0xFFFF) << 32 | low
