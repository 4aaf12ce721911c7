"""What both machines share: how many lanes there are, and what a place in a tile is."""

from __future__ import annotations

from typing import Any, NamedTuple

LANES = 128
HALF_LIMIT = 65504.0  # the largest float16


class Place(NamedTuple):
    """A lane's row of a tile, and a byte within any of its 16-byte chunks; `flip` is what the swizzle does to chunk numbers, in bytes."""

    tile: Any
    row: Any
    sub: Any
    base: Any = None
    flip: Any = None
