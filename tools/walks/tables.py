"""The files on each path as a table, before the house's third design and now."""

from __future__ import annotations

import json
from pathlib import Path

STORED = Path(__file__).parents[2] / "docs" / "house_paths.json"
WANTED = {
    "start": 0.70,
    "memory sizing": 0.70,
    "abort": 0.70,
    "decode step": 0.85,
    "chat": 0.85,
}
HOST, DEVICE = "decode step, host", "decode step, device"
type Paths = dict[str, list[str]]


def stored() -> dict[str, Paths]:
    """The recorded files of each path, `before` and `now`."""
    return json.loads(STORED.read_text())


def counted(paths: Paths) -> dict[str, int]:
    """The number of files on each path. A decode step's are those of the host and the device."""
    counts = {name: len(files) for name, files in paths.items()}
    counts["decode step"] = len({*paths[HOST], *paths[DEVICE]})
    return counts


def table(before: Paths, now: Paths) -> str:
    """Counts of each path, before and now."""
    old = counted(before)
    new = counted(now)
    lines = ["| path | files before | wanted | files now | share |", "|---|---|---|---|---|"]
    for name in ["start", "memory sizing", "abort", "chat", "decode step", HOST, DEVICE]:
        wanted = f"{int(WANTED[name] * old[name])}" if name in WANTED else "–"
        share = f"{new[name] / old[name]:.0%}"
        lines.append(f"| {name} | {old[name]} | {wanted} | {new[name]} | {share} |")
    return "\n".join(lines)
