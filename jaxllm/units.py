"""Sizes as people read them."""

from __future__ import annotations

GIB = 2**30


def amount(size: int, down: bool = False) -> str:
    """Bytes for messages, rounded up. Available memory is rounded `down`, so that it never reads
    like a need that exceeds it."""
    unit, name = next(
        (
            (unit, name)
            for unit, name in ((GIB, "GiB"), (2**20, "MiB"))
            if size >= unit / 10 or not size
        ),
        (2**10, "KiB"),
    )
    if down:
        hundredths = 100 * size // unit
    else:
        hundredths = -(-100 * size // unit)
    return f"{hundredths / 100:.2f} {name}"
