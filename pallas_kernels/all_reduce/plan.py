"""One-shot or two-shot: which exchange of some rows takes less time, and the inboxes for it."""

from __future__ import annotations

from pallas_kernels.all_reduce.group import LANES, WORD, Layout

MOST_DEVICES = 8
GATHER_ROW = 2 * LANES * WORD  # bytes of a row of `gather`
# Measured on two H200 that NVLink joins: one hop of small rows, and ordinary stores of many rows
HOP_SECONDS = 1.5e-6
BYTES_PER_SECOND = 340e9


def is_one_shot(devices: int, size: int) -> bool:
    """Whether every device should send all `size` bytes to every other one.

    One-shot takes a hop and sends `(X - 1)·size` bytes. Two-shot takes two hops and sends
    `2·(X - 1)/X·size`: an owner adds up each row and gives back the sum. So of two devices one-shot
    never loses, of 4 it wins up to 340 KB, of 8 up to 97 KB. The rule is computed from figures of
    two devices.
    """
    others = devices - 1
    saved = (others - 2 * others / devices) * size / BYTES_PER_SECOND
    return saved <= HOP_SECONDS


def layout_for(devices: int, rows: int, row_bytes: int, gathered: int = 0) -> Layout:
    """The inbox for sums of up to `rows` rows of `row_bytes`, and gathers of `gathered` bytes."""
    most = rows
    while not is_one_shot(devices, most * row_bytes):
        most -= 1
    return Layout(
        devices,
        row=max(-(-row_bytes // (LANES * WORD)) * LANES * WORD, GATHER_ROW),
        one_shot=max(most, -(-gathered // GATHER_ROW), 1),
        two_shot=rows if most < rows else 0,
    )
