"""What processes hold, as Linux tells."""

from __future__ import annotations

import os
from pathlib import Path


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def files(pid: int) -> int:
    """Files that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
