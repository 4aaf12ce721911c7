"""List the benchmarks, or with `--all` run the ones that any machine can run and record their results."""

from __future__ import annotations

import subprocess
import sys

HERE = {
    "throughput": "offline throughput: mixed prompts, all submitted at once",
    "latency": "offline latency of one batch of equal prompts",
    "batching": "continuous against static batching, and KV memory waste",
    "report": "the tables of the recorded results, as in README.md",
}


def main() -> int:
    """Print the list, or run everything."""
    if "--all" not in sys.argv[1:]:
        print("usage: python -m benchmarks.NAME [--help], or python -m benchmarks --all\n")
        print("\n".join(f"  {name:<12} {text}" for name, text in HERE.items()))
        return 0
    for name in ("throughput", "latency", "batching"):
        code = subprocess.call([sys.executable, "-m", f"benchmarks.{name}", "--save"])
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
