"""The tables of the recorded results: `python -m benchmarks.report` prints what README.md shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

COLUMNS: dict[str, dict[str, str]] = {
    "throughput": {
        "requests": "num_requests",
        "requests/s": "requests_per_second",
        "output tokens/s": "output_tokens_per_second",
        "total tokens/s": "tokens_per_second",
    },
    "latency": {"TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms", "whole batch s": "avg_latency"},
    "batching": {
        "static requests/s": "static_requests_per_second",
        "continuous requests/s": "continuous_requests_per_second",
        "ratio": "measured_ratio",
        "ratio of step counts": "predicted_ratio",
        "KV waste, 250-token prompts": "kv_waste_long_prompts",
    },
}
TITLES = {
    "throughput": "Offline throughput (`python -m benchmarks.throughput`)",
    "latency": "Offline latency (`python -m benchmarks.latency`)",
    "batching": "Continuous against static batching (`python -m benchmarks.batching`)",
}


def tables(results: Path = RESULTS) -> str:
    """One Markdown table per benchmark that has results; a row per model and machine."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    known = [r for r in records if isinstance(r, dict) and r.get("benchmark") in COLUMNS]
    parts = [table(name, [r for r in known if r["benchmark"] == name]) for name in COLUMNS]
    parts += [engines(r) for r in records if isinstance(r, dict) and r.get("benchmark") == "engine"]
    return "\n\n".join(part for part in parts if part)


def table(name: str, records: list[dict[str, Any]]) -> str:
    """The table of one benchmark, empty without records."""
    if not records:
        return ""
    columns = COLUMNS[name]
    head = ["model", "device", *columns]
    rows = [[r["arguments"]["model"], device(r["machine"]), *(str(r["figures"][key]) for key in columns.values())] for r in records]
    lines = [f"{TITLES[name]}:", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def engines(record: dict[str, Any]) -> str:
    """Engines beside each other on one workload: a row per figure."""
    names = list(record["figures"])
    rows = [[figure, *(str(record["figures"][name].get(figure, "–")) for name in names)] for figure in record["figures"][names[0]]]
    head = f"{record['arguments']['model']}, {device(record['machine'])}, {record['arguments']['options']}, {record['date']}:"
    lines = [head, "", "| figure | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def device(machine: dict[str, Any]) -> str:
    """The device's name; for a CPU, its model and cores."""
    kinds = {d["kind"] for d in machine["devices"]}
    return f"{machine['cpu']}, {machine['cpu_cores']} cores" if kinds == {"cpu"} else ", ".join(sorted(kinds))


if __name__ == "__main__":
    print(tables())
