"""Results as JSON: what ran, on what machine, and the figures."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from jaxllm.environment import fingerprint, processor

RESULTS = Path(__file__).parent / "results"


def parser(what: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    out = argparse.ArgumentParser(
        description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    out.add_argument(
        "--model",
        default="demo",
        help="model directory, hub id, demo, or shape:NAME for random weights of a shape",
    )
    out.add_argument("--seed", type=int, default=1, help="seed of the workload")
    out.add_argument("--save", action="store_true", help="record the result in benchmarks/results/")
    out.add_argument("--output-json", type=Path, help="write the result to this file")
    return out


def finish(
    name: str, arguments: argparse.Namespace, figures: Any, machine: dict[str, Any] | None = None
) -> None:
    """Print the figures, unless they are rows that were printed already, and write them where the
    arguments ask."""
    asked = {
        k: "inf" if v == math.inf else v
        for k, v in vars(arguments).items()
        if k not in ("save", "output_json", "api_key")
    }
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "arguments": asked,
        "figures": figures,
        "machine": machine or fingerprint(),
    }
    record["machine"] = machine or fingerprint()
    text = json.dumps(record, indent=1, default=str)
    if isinstance(figures, dict):
        print(json.dumps(figures, indent=1))
    if arguments.output_json:
        arguments.output_json.write_text(text + "\n")
    if arguments.save:
        device = record["machine"]["devices"][0]["kind"].lower().replace(" ", "-")  # type: ignore[index]
        RESULTS.mkdir(exist_ok=True)
        model = Path(str(arguments.model)).name.removeprefix("shape:")
        (RESULTS / f"{name}-{model}-{device}.json").write_text(text + "\n")


def host(device: str | None = None) -> dict[str, Any]:
    """What `fingerprint` says, for a client of a server on this machine: starts no JAX back end,
    which would take the device's memory. `device` names that of a server elsewhere."""
    if device is not None:
        return {"devices": [{"kind": device}]}
    return {
        "cpu": processor(),
        "cpu_cores": os.cpu_count(),
        "devices": [{"kind": kind} for kind in gpus("name") or ["cpu"]],
    }


def gpus(what: str) -> list[str]:
    """What `nvidia-smi` says of each GPU of the machine, without units; nothing where it is not."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    if not shutil.which(command[0]):
        return []
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def percentiles(values: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles in the units of `values`."""
    ordered = sorted(values)
    return {
        f"p{p}": round(ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))], 6)
        for p in (10, 25, 50, 75, 90, 99)
    }
