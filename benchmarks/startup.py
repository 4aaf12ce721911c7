"""From the start of a process to its first token: cold, with every cache empty, and warm, in a
second process that finds the caches.

    python -m benchmarks.startup --model shape:qwen2.5-7b --max-model-len 9216 --max-num-seqs 256

Phases of the engine overlap (weights load while programs compile), so they need not add up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import finish, host, parser
from benchmarks.shapes import engine_options


def child(began: float, options: dict[str, Any]) -> None:
    """The process that is measured: `began` is when it was started, by time.perf_counter, which
    processes of a machine share."""
    from jaxllm.config import EngineConfig
    from jaxllm.engine.load import load_engine
    from jaxllm.engine.startup.report import Report
    from jaxllm.messages import GenerateRequest
    from jaxllm.sampling.options import SamplingParams

    phases = {"Interpreter and imports": time.perf_counter() - began}
    report = Report()
    engine = load_engine(EngineConfig(**options), report)
    ready = time.perf_counter()
    engine.add(
        GenerateRequest(
            id="first",
            prompt_token_ids=[1, 2, 3, 4],
            params=SamplingParams(max_tokens=1, ignore_eos=True),
        )
    )
    while not any(delta.token_ids for delta in engine.step()):
        pass
    end = time.perf_counter()
    phases |= report.seconds | {"First token": end - ready}
    print(
        json.dumps(
            {
                "seconds": end - began,
                "phases": {name: round(seconds, 2) for name, seconds in phases.items()},
            }
        ),
        flush=True,
    )


def start(options: dict[str, Any], caches: Path) -> dict[str, Any]:
    """Run one process to its first token; returns what it says. Raises SystemExit with its last
    words when it fails."""
    options = options | {"compilation_cache_dir": str(caches / "jaxllm")}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", "--child", repr(began), json.dumps(options)],
        env=os.environ | {"CUDA_CACHE_PATH": str(caches / "cuda")},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the process failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """One cold start and one warm one."""
    with tempfile.TemporaryDirectory() as folder:
        cold = start(options, Path(folder))
        print(f"cold: {cold['seconds']:.2f} s {cold['phases']}", file=sys.stderr)
        warm = start(options, Path(folder))
        print(f"warm: {warm['seconds']:.2f} s {warm['phases']}", file=sys.stderr)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "cold_s": round(cold["seconds"], 2),
        "warm_s": round(warm["seconds"], 2),
        "cold_phases": cold["phases"],
        "warm_phases": warm["phases"],
        "cache_mb": round(size / 1e6, 1),
    }


def main() -> None:
    """Measure, or be the process that is measured."""
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), json.loads(sys.argv[3]))
        return
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument(
        "--load-format", default="auto", help="dummy for random weights of a config directory"
    )
    args.add_argument("--max-model-len", type=int)
    args.add_argument("--max-num-seqs", type=int)
    args.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of further engine options"
    )
    a = args.parse_args()
    own = {
        "load_format": a.load_format,
        "max_model_len": a.max_model_len,
        "max_num_seqs": a.max_num_seqs,
    }
    finish("startup", a, measure(own | engine_options(a.model) | a.options), host())


if __name__ == "__main__":
    main()
