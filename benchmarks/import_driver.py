"""Take figures of an engine into its record, `benchmarks/results/engine-NAME-MACHINE.json`, where
newer figures replace older ones.

    python -m benchmarks.import_driver figures.jsonl … --engine jaxllm --machine "NVIDIA H200"

A file has one figure a line, as `benchmarks.engine` prints them, or is what `--output-json` of
`benchmarks.engine` or `benchmarks.serving` wrote. A line with `"figure": "http"` and a serving
record give several figures: output tokens/s without a rate, latencies with one. Other lines are
skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compare import FIGURES, MEASUREMENT, OURS, Row, merge
from benchmarks.record import RESULTS

LOAD = (
    "num_prompts",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "max_concurrency",
)
LOADS = (
    (256, 562, 562, 0.822, None, math.inf),  # 100 to 1,024 tokens each way
    (400, 512, 128, 0.0, None, 20.0),
)


def read(path: Path, date: str) -> Iterator[Row]:
    """The rows of one file: lines of a driver, or the record that `--output-json` wrote."""
    text = path.read_text()
    if text.startswith("{\n"):
        record = json.loads(text)
        for figure in [as_line(record)] if record["benchmark"] == "serving" else record["figures"]:
            yield from rows(figure, record["date"])
        return
    for line in text.splitlines():
        try:
            found = json.loads(line) if line.startswith("{") else {}
        except ValueError:
            continue
        yield from rows(found, date)


def as_line(record: dict) -> dict:
    """A serving record as a line. Raises SystemExit when its load is none of those that are
    compared: figures of other loads differ."""
    asked, found = record["arguments"], record["figures"]
    rate = float(asked["request_rate"])
    load = (*(asked[name] for name in LOAD), rate)
    if load not in LOADS or found.get("failed"):
        raise SystemExit(
            "this load is not compared, or not all of it was served: "
            f"{dict(zip(LOAD, load, strict=False))}, rate {rate}"
        )
    line = {
        "figure": "http",
        "model": asked["model"],
        "prompts": asked["num_prompts"],
        "out_tok_s": found["output_throughput"],
    }
    for name in ("ttft", "tpot", "itl"):
        line[f"{name}_ms"] = {
            quantile: found[f"{quantile}_{name}_ms"] for quantile in ("p50", "p99")
        }
    return line | {"rate": 0 if math.isinf(rate) else rate}


def rows(found: dict, date: str) -> Iterator[Row]:
    """The rows of one line."""
    figure, when = (
        found.get("figure"),
        {"date": found.get("date", date)}
        | {name: found[name] for name in ("note",) if name in found},
    )
    if figure == "http":
        base: Row = {
            "shape": Path(str(found["model"])).name,
            "prompts": found["prompts"],
            "rate": found["rate"],
        }
        if not found["rate"]:
            yield base | {"figure": "http_tok_s", "value": found["out_tok_s"]} | when
            return
        for name, quantile in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p99")):
            yield (
                base
                | {"figure": f"http_{name}_{quantile}_ms", "value": found[f"{name}_ms"][quantile]}
                | when
            )
    elif figure in FIGURES:
        value = next(found[name] for name in ("value", "out_tok_s", "seconds") if name in found)
        # The driver's default, which it did not always print
        at = {"start": 512} if figure == "multi_turn" else {}
        yield (
            at
            | {
                name: x
                for name, x in found.items()
                if name not in (*MEASUREMENT, "engine", "label")
            }
            | {"value": value}
            | when
        )


def main() -> None:
    """Read the files and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--engine", default=OURS, help="its name and version, as the tables show it"
    )
    parser.add_argument("--machine", default="NVIDIA H200")
    parser.add_argument(
        "--how", default="", help="how the figures were taken; kept from the record by default"
    )
    parser.add_argument(
        "--date", default=time.strftime("%Y-%m-%d"), help="of lines that bring none"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    a = parser.parse_args()
    name = "-".join(f"{a.engine.split('(')[0]} {a.machine.split()[-1]}".lower().split())
    path = a.results / f"engine-{name}.json"
    record = json.loads(path.read_text()) if path.exists() else {"how": "", "rows": []}
    fresh = [row for file in a.files for row in read(file, a.date)]
    record = {
        "benchmark": "engine",
        "engine": a.engine,
        "machine": a.machine,
        "how": a.how or record["how"],
        "rows": merge(record["rows"], fresh),
    }
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in record.pop("rows"))
    path.write_text(
        json.dumps(record, indent=1, ensure_ascii=False)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
    )
    print(f"{len(fresh)} figures into {path}")


if __name__ == "__main__":
    main()
