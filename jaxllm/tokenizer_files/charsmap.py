"""Checks a SentencePiece model's map of characters before it is used.

The Rust library follows its offsets unchecked, and a wrong one would end a request's thread. The
map is a double-array trie of 32-bit units (darts-clone) and the texts that its leaves point to,
each with a zero byte behind it: https://github.com/google/sentencepiece, `normalizer.cc`.
"""

from __future__ import annotations

import numpy as np

LEAF = 1 << 8  # the unit at the target holds a value
VALUE = 1 << 31  # the unit is such a value


def check_charsmap(data: bytes) -> None:
    """Raises ValueError for a map that points out of itself."""
    size = int.from_bytes(data[:4], "little")
    texts = np.frombuffer(data[4 + size :], np.uint8)
    if not 0 < size <= len(data) - 4 or size % 4:
        raise ValueError("its map of characters is cut off")
    data[4 + size :].decode()
    units = np.frombuffer(data[4 : 4 + size], "<u4").astype(np.int64)
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    nodes = units < VALUE
    nodes[0] = True  # the root, whatever it says
    targets = (np.arange(len(units)) ^ offsets)[nodes]
    if ((targets | 0xFF) >= len(units)).any():
        raise ValueError("its map of characters points out of itself")
    has_leaf = (units[nodes] & LEAF) != 0
    values = units[targets[has_leaf]] & (VALUE - 1)
    # A text begins where the byte is none of the middle of a character
    starts = np.append((texts & 0xC0) != 0x80, True)
    if (values >= len(starts)).any() or not starts[values].all():
        raise ValueError("its map of characters points into the middle of a text")
