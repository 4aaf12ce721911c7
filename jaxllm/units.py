"""Sizes as people read them."""

from __future__ import annotations

GIB = 2**30


def amount(size: int, down: bool = False) -> str:
    """Bytes for messages, rounded up, or `down` where they are what there is: what is needed and
    lacks never looks the same."""
    unit, name = next(
        (
            (unit, name)
            for unit, name in ((GIB, "GiB"), (2**20, "MiB"))
            if size >= unit / 10 or not size
        ),
        (2**10, "KiB"),
    )
    hundredths = 100 * size // unit if down else -(-100 * size // unit)
    return f"{hundredths / 100:.2f} {name}"
