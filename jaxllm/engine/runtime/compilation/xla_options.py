"""XLA options of programs by device kind, measured and kept as data in `tuned/`. No jax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Value = bool | int | str

TUNED = Path(__file__).parent / "tuned"
# Of every program for GPUs. Rematerialization computes values again where memory lacks. It counts
# pages anew for each kernel that writes them in place, so it would search for memory in vain, and
# leave copies of small kernels behind. Products of the same rows are not merged: XLA would write
# their weights side by side at every step. Those that pay have been stored so.
FOR_GPUS: Mapping[str, Value] = {
    "xla_disable_hlo_passes": "rematerialization",
    "xla_gpu_dot_merger_threshold_mb": 0,
}

# Where processes of one group compile different programs. Otherwise they time kernels in turn, and
# each waits for what the others find about a program that they do not have.
APART: Mapping[str, Value] = {"xla_gpu_shard_autotuning": False}


@dataclass(frozen=True)
class Entry:
    """Options of some variants of a program.

    Attributes:
        program: its name, "decode" say.
        low, high: rows of the variants.
        options: XLA's options.
        weights: least bytes of weights on each device. With large weights, other kernels of ours
            run beside XLA's.
    """

    program: str
    low: int
    high: int
    options: Mapping[str, Value]
    weights: float = 0


@dataclass(frozen=True)
class XlaOptions:
    """The options that measured best on one device kind or one alike; empty if none were
    measured.

    Attributes:
        apart: whether other processes of the group compile other programs.
    """

    entries: tuple[Entry, ...] = ()
    apart: bool = False

    @classmethod
    def of(cls, device_kind: str, weights: float = 0, folder: Path = TUNED) -> XlaOptions:
        """The table of a device kind as JAX names it ("NVIDIA H200"), or of one that is alike.
        `weights` are bytes on each device."""
        entries = [
            Entry(e["program"], e["rows"][0], e["rows"][1], e["options"], e.get("weights", 0))
            for e in _programs(device_kind, folder)
        ]
        return cls(tuple(entry for entry in entries if entry.weights <= weights))

    def for_gpus(self, program: str, rows: int) -> dict[str, Value]:
        """`at`, with what every program for GPUs is given."""
        return {**FOR_GPUS, **(APART if self.apart else {}), **self.at(program, rows)}

    def at(self, program: str, rows: int) -> dict[str, Value]:
        """Options of a program with `rows` rows, decode rows and chunk tokens together. The first
        matching entry counts."""
        return next(
            (
                dict(entry.options)
                for entry in self.entries
                if entry.program == program and entry.low <= rows <= entry.high
            ),
            {},
        )


def _programs(device_kind: str, folder: Path) -> list[dict[str, Any]]:
    """The entries of the device kind's own table, else of one that names it as `alike`: kinds with
    the same processors, whose own was not measured."""
    own = table_path(device_kind, folder)
    for path in [own] if own.is_file() else sorted(folder.glob("*.json")):
        table = json.loads(path.read_text())
        if path == own or device_kind.startswith(tuple(table.get("alike", ()))):
            return table["programs"]
    return []


def table_path(device_kind: str, folder: Path = TUNED) -> Path:
    """Path of a device kind's table, whether it exists or not."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', device_kind.lower())}.json"
