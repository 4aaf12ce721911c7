"""From the start of a process to its first token: cold, with every cache empty, and warm, in a
second process that finds the caches.

    python -m benchmarks.startup --model shape:qwen2.5-7b --max-model-len 9216 --max-num-seqs 256
    python -m benchmarks.startup --model demo --server --repeat 5

With `--server`: from the command to a server's `/ready`, and the processor time until then.
Phases of the engine overlap (weights load while programs compile), so they need not add up.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import finish, host, parser
from benchmarks.shapes import engine_options


def child(began: float, options: dict[str, Any]) -> None:
    """The process that is measured: `began` is when it was started, by time.perf_counter, which
    processes of a machine share."""
    from jaxllm.config import EngineConfig
    from jaxllm.engine.load import load_engine
    from jaxllm.engine.startup.report import Report
    from jaxllm.messages import GenerateRequest
    from jaxllm.prompt import Prompt
    from jaxllm.sampling.options import SamplingParams

    phases = {"Interpreter and imports": time.perf_counter() - began}
    report = Report()
    engine = load_engine(EngineConfig(**options), report)
    ready = time.perf_counter()
    engine.add(
        GenerateRequest(
            id="first",
            prompt=Prompt([1, 2, 3, 4]),
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


def start_server(model: str, caches: Path) -> dict[str, float]:
    """Seconds from the command to `/ready`, and processor seconds of all its processes. Raises
    SystemExit with its last words when it ends before."""
    port = free_port()
    command = [sys.executable, "-m", "jaxllm.server", "--model", model, "--port", str(port)]
    command += ["--compilation-cache-dir", str(caches)]
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdout=log, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            while not is_ready(f"http://127.0.0.1:{port}/ready"):
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the server failed:\n{log.read()[-2000:]}")
                time.sleep(0.02)
            taken = time.perf_counter() - began
            return {"seconds": taken, "processor": processor_seconds(server.pid)}
        finally:
            server.terminate()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_ready(url: str) -> bool:
    """Whether a server answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def processor_seconds(pid: int) -> float:
    """Of a process and its descendants, by now."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def measure_server(model: str, repeat: int) -> dict[str, Any]:
    """Cold starts, each with caches of its own, and warm ones; medians, and all in order."""
    cold, warm = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            caches = Path(folder, "jaxllm")
            cold.append(start_server(model, caches))
            start_server(model, caches)  # what the first one was stopped before it had made
            warm.append(start_server(model, caches))
        print(f"cold {cold[-1]}, warm {warm[-1]}", file=sys.stderr)
    found: dict[str, Any] = {}
    for name, runs in (("cold", cold), ("warm", warm)):
        for unit in ("seconds", "processor"):
            values = [round(run[unit], 2) for run in runs]
            found[f"{name}_{unit}"] = statistics.median(values)
            found[f"{name}_{unit}_runs"] = values
    return found


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
    args.add_argument(
        "--server", action="store_true", help="time a server until /ready, with default options"
    )
    args.add_argument("--repeat", type=int, default=5, help="starts of each kind, with --server")
    a = args.parse_args()
    if a.server:
        finish("server-startup", a, measure_server(a.model, a.repeat), host())
        return
    own = {
        "load_format": a.load_format,
        "max_model_len": a.max_model_len,
        "max_num_seqs": a.max_num_seqs,
    }
    finish("startup", a, measure(own | engine_options(a.model) | a.options), host())


if __name__ == "__main__":
    main()
