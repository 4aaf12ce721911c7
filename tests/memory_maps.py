"""Executables of XLA's CPU compiler take memory maps, of which a process may have 65,530."""

from __future__ import annotations

import gc
import pathlib
import sys

MANY = 20_000


def release() -> None:
    """Let go those that nobody holds, where there are many."""
    maps = pathlib.Path("/proc/self/maps")
    if "jax" in sys.modules and maps.is_file() and len(maps.read_bytes().splitlines()) > MANY:
        sys.modules["jax"].clear_caches()
        gc.collect()
