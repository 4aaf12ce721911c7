"""The tables of the recorded results: `python -m benchmarks.report` prints what README.md and
docs/figures.md show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

from benchmarks import compare
from benchmarks.record import RESULTS

# What a device does at best, as measured: copies of large buffers (a kernel that only reads can be
# a little faster), bf16 matrix products. A result of `benchmarks.ceilings` goes before these.
CEILINGS: dict[str, dict[str, float]] = {"NVIDIA H200": {"TB/s": 4.3, "GB/s": 4300, "TFLOP/s": 790}}

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
    "serving": {
        "requests/s asked": "request_rate",
        "requests/s": "request_throughput",
        "output tokens/s": "output_throughput",
        "TTFT ms, median": "median_ttft_ms",
        "p99": "p99_ttft_ms",
        "TPOT ms, median": "median_tpot_ms",
        "ITL ms, p99": "p99_itl_ms",
    },
    "stall": {
        "streams": "streams",
        "prompt": "prompt",
        "ITL ms before, median": "median_itl_ms",
        "worst gap ms": "stall_ms",
    },
    "startup": {"caches empty, s": "cold_s", "second process, s": "warm_s"},
    "server-startup": {
        "caches empty, s": "cold_seconds",
        "of a processor": "cold_processor",
        "programs kept, s": "warm_seconds",
        "of a processor then": "warm_processor",
    },
    "loading": {
        "GB": "gigabytes",
        "GB/s from disk": "disk_gb_per_s",
        "GB/s from the page cache": "page_cache_gb_per_s",
        "peak extra host memory, GB": "extra_host_gb",
    },
}
TITLES = {
    "throughput": "Offline throughput (`python -m benchmarks.throughput`)",
    "latency": "Offline latency (`python -m benchmarks.latency`)",
    "batching": "Continuous against static batching (`python -m benchmarks.batching`)",
    "serving": "Serving over HTTP (`python -m benchmarks.serving`)",
    "stall": "Running streams while a long prompt arrives (`python -m benchmarks.stall`)",
    "startup": "Process start to first token (`python -m benchmarks.startup`)",
    "server-startup": "Command to `/ready` (`python -m benchmarks.startup --server`)",
    "loading": "Loading safetensors (`python -m benchmarks.loading`)",
}


def records(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Every recorded result."""
    return [
        record
        for path in sorted(results.glob("*.json"))
        if isinstance(record := json.loads(path.read_text()), dict)
    ]


def tables(results: Path = RESULTS) -> str:
    """Engines beside each other, then one Markdown table per benchmark that has results, a row per
    model and machine; then kernels."""
    found = records(results)
    parts = [compare.tables(engines(found))]
    parts += [table(name, [r for r in found if r.get("benchmark") == name]) for name in COLUMNS]
    parts += [collectives(r) for r in found if r.get("benchmark") == "collective"]
    parts += [kernels(r, ceilings(found)) for r in found if r.get("mode") == "time"]
    return "\n\n".join(part for part in parts if part)


def headline(results: Path = RESULTS) -> str:
    """In how many figures jaxllm is ahead of other engines, and in which it is not."""
    return compare.headline(engines(records(results)))


def summary(results: Path = RESULTS, shapes: Container[str] | None = None) -> str:
    """The main figures of each shape, or of those in `shapes`, engines beside each other."""
    return compare.summary(engines(records(results)), shapes)


def engines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of engines beside each other."""
    return [record for record in found if record.get("benchmark") == "engine"]


def table(name: str, records: list[dict[str, Any]]) -> str:
    """The table of one benchmark, empty without records."""
    if not records:
        return ""
    columns = COLUMNS[name]
    head = ["model", "device", *columns]
    rows = [
        [
            configured(r["arguments"]),
            device(r["machine"]),
            *(str(r["figures"].get(key, "–")) for key in columns.values()),
        ]
        for r in records
    ]
    lines = [f"{TITLES[name]}:", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def collectives(record: dict[str, Any]) -> str:
    """Microseconds of a sum over GPUs: a row per size, a column per way. Nothing where none was
    timed, as with --check and --absent."""
    rows = [row for row in record["figures"] if "us" in row]
    if not rows:
        return ""
    ways = record["arguments"]["ways"]
    lines = [
        "A sum over GPUs with residual sum and norm (`python -m benchmarks.collective`), "
        f"{device(record['machine'])}, µs (where only the host's launch was the limit: ≤):",
        "",
        "| rows | width | " + " | ".join(ways) + " |",
        "|---|---|" + "---|" * len(ways),
    ]
    for size in dict.fromkeys((row["rows"], row["width"]) for row in rows):
        us = {row["way"]: row for row in rows if (row["rows"], row["width"]) == size}
        cells = [_microseconds(us.get(way)) for way in ways]
        lines.append(f"| {size[0]:,} | {size[1]:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _microseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"≤ {row['us']}" if row["launch_us"] > 0.9 * row["us"] else str(row["us"])


def ceilings(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By device, what it does at best, by unit."""
    out = dict(CEILINGS)
    for record in (r for r in found if r.get("benchmark") == "ceilings"):
        copy, product = record["figures"]["copy_tb_per_s"], record["figures"]["matmul_tflop_per_s"]
        out[device(record["machine"])] = {"TB/s": copy, "GB/s": copy * 1000, "TFLOP/s": product}
    return out


def kernels(record: dict[str, Any], limits: dict[str, dict[str, float]]) -> str:
    """Kernel times of one machine: a row per shape, with the rate and its share of what the machine
    does at best."""
    most = limits.get(record["device"], {})
    best = ", ".join(f"{value:g} {unit}" for unit, value in most.items() if unit != "GB/s")
    head = f"Kernels (`python -m benchmarks.kernels time …`), {record['device']}" + (
        f", measured ceilings {best}" if best else ""
    )
    head += f"; {record['note']}:" if "note" in record else ":"
    lines = [head, "", "| op | shape | µs | rate | of the ceiling |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        unit = rate(row)
        shape = ", ".join(
            f"{name} {value}"
            for name, value in row.items()
            if name not in ("op", "us", "tuning", "error", unit)
        )
        speed = f"{row[unit]:g} {unit}" if unit else "–"
        share = f"{row[unit] / most[unit]:.0%}" if unit in most else "–"
        lines.append(f"| {row['op']} | {shape} | {row.get('us', 'failed')} | {speed} | {share} |")
    return "\n".join(lines)


def rate(row: dict[str, Any]) -> str | None:
    """The unit of a kernel's rate, which is also the rate's name in its row."""
    return next((unit for unit in ("TB/s", "GB/s", "TFLOP/s") if unit in row), None)


def named(model: str) -> str:
    """A model as the tables call it: without its folder."""
    return Path(model).name


def configured(arguments: dict[str, Any]) -> str:
    """The model, with the engine's options that were given."""
    options = arguments.get("options") or {}
    given = [f"{name} {value}" for name, value in options.items() if name != "max_model_len"]
    if (rows := arguments.get("max_num_seqs")) is not None:
        given.append(f"max_num_seqs {rows}")
    return ", ".join([named(arguments["model"]), *given])


def device(machine: dict[str, Any]) -> str:
    """The device's name, and of several their number; for a CPU, its model and cores."""
    kinds = Counter(d["kind"] for d in machine["devices"])
    return (
        f"{machine['cpu']}, {machine['cpu_cores']} cores"
        if kinds.keys() == {"cpu"}
        else ", ".join(
            f"{count} × {kind}" if count > 1 else kind for kind, count in sorted(kinds.items())
        )
    )


if __name__ == "__main__":
    print(headline(), summary(), tables(), sep="\n\n")
