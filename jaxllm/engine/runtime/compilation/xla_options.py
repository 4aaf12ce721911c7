"""XLA options per program, measured on a device kind and kept as data in `tuned/`. Imports no jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

type Value = bool | int | str

TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Entry:
    """Options of the programs of one kind ("decode", "extend", "sample", "ingest") that run `low`
    to `high` rows, of a model with at least `weights` bytes of them on its one device: with large
    weights other kernels of ours run beside XLA's."""

    kind: str
    low: int
    high: int
    options: Mapping[str, Value]
    weights: float = 0


@dataclass(frozen=True)
class XlaOptions:
    """What was measured to be best on one device kind; nothing for a kind that was never measured,
    nor for a program no entry names."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, device_kind: str, weights: float = 0, folder: Path = TUNED) -> XlaOptions:
        """The table of a device kind as JAX names it ("NVIDIA H200") for so many bytes of weights
        on one device; 0 for several devices."""
        path = table_path(device_kind, folder)
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text())["programs"]
        entries = [
            Entry(e["kind"], e["rows"][0], e["rows"][1], e["options"], e.get("weights", 0))
            for e in found
        ]
        return cls(tuple(entry for entry in entries if entry.weights <= weights))

    def at(self, kind: str, rows: int) -> dict[str, Value]:
        """Options for a program of `rows` rows: decode rows and chunk tokens together. The first
        entry that names it counts."""
        return next(
            (dict(e.options) for e in self.entries if e.kind == kind and e.low <= rows <= e.high),
            {},
        )


def table_path(device_kind: str, folder: Path = TUNED) -> Path:
    """Where the table of a device kind lies, if there is one."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', device_kind.lower())}.json"
