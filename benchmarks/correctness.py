"""Correctness on this device: kernels, a whole model, an engine's invariants, the demo model,
seeds, updates in place, and a soak.

    python -m benchmarks.correctness --output-json results.json
    python -m benchmarks.correctness --parts kernels,demo
    python -m benchmarks.correctness --parts invariants,demo --options '{"tensor_parallel_size": 2}'
    python -m benchmarks.correctness --parts soak --soak-steps 2000

One JSON line per check as it is done; the exit status is 1 when a check is not ok. On a CPU the
demo model alone is checked by default.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.correct_engine import demo, invariants, mixed, seeds
from benchmarks.correct_kernels import kernels
from benchmarks.correct_model import model, narrow_pages
from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from benchmarks.soak import soak
from jaxllm import LLM
from jaxllm.engine.runtime.lattice import forward_key
from jaxllm.engine.startup.device_client import reserve_memory
from jaxllm.engine.startup.program_cache import use_compilation_cache

type Row = dict[str, Any]

PARTS = ("kernels", "model", "narrow", "invariants", "demo", "seeds", "mixed", "memory", "soak")
SHARE = 0.9  # of the device's memory
MIB = 2**20


def memory(name: str, decodes: int = 64, tokens: int = 512, **more: Any) -> Iterator[Row]:
    """Whether decode and prefill programs of the whole engine update the pool in place: what their
    results share with their arguments covers all pages, and what they need beside is small."""
    llm = LLM(
        **engine_options(name)
        | {"max_model_len": 4096, "gpu_memory_utilization": SHARE, "enforce_eager": True}
        | more
    )
    programs = llm.engine.runner.programs
    shapes = programs.shapes
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.kv))
    wanted: list[tuple[str, Any]] = [
        ("decode", shapes.buckets.fit_decode(min(decodes, shapes.slots))),
        ("extend", shapes.buckets.fit_extend(tokens, 1, 0)),
    ]
    for kind, shape in wanted:
        found = programs.get(forward_key(shape)).memory_analysis()
        row = {
            "check": f"in place: {kind} {shape}",
            "pool_mib": pool / MIB,
            "alias_mib": found.alias_size_in_bytes / MIB,
        }
        row |= {"temp_mib": found.temp_size_in_bytes / MIB}
        row |= {"other_output_mib": (found.output_size_in_bytes - found.alias_size_in_bytes) / MIB}
        ok = found.alias_size_in_bytes >= pool and found.temp_size_in_bytes < pool / 20
        yield {key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()} | {
            "ok": ok
        }


def guarded(part: str, rows: Iterator[Row], report: Callable[[Row], None]) -> None:
    """Take all rows of a part; an error is a row too, so that it ends nothing else."""
    begin = time.perf_counter()
    try:
        for row in rows:
            report({"part": part, **row})
    except Exception as error:  # whatever a compiler or device says
        place = traceback.format_exception(error)[-4:]
        report(
            {
                "part": part,
                "error": f"{type(error).__name__}: {str(error)[:500]}",
                "at": "".join(place)[-1500:],
                "ok": False,
            }
        )
    gc.collect()  # the next part needs the memory of this one's engines
    report({"part": part, "seconds": round(time.perf_counter() - begin, 1)})


def main() -> int:
    """Check the parts that were asked for."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.set_defaults(model="shape:qwen2.5-7b")
    args.add_argument("--parts", help=f"of {','.join(PARTS)}; by default all, on a CPU demo")
    args.add_argument(
        "--options",
        type=json.loads,
        default={},
        help="JSON object of further arguments of LLM, for parts that have engines",
    )
    args.add_argument("--soak-steps", type=int, default=2000, help="of each soak")
    a = args.parse_args()
    if a.parts and not set(a.parts.split(",")) <= set(PARTS):
        args.error(f"--parts must be of {','.join(PARTS)}")
    use_compilation_cache(None)
    reserve_memory(SHARE)
    accelerator = jax.devices()[0].platform != "cpu"
    parts = a.parts.split(",") if a.parts else PARTS if accelerator else ("demo",)
    on_cpu: dict[str, Any] = {"dtypes": ("float32",), "enforce_eager": True}
    checks: dict[str, Callable[[], Iterator[Row]]] = {
        "kernels": kernels,
        "model": lambda: model(a.model),
        "narrow": lambda: narrow_pages(a.model),
        "invariants": lambda: invariants(**a.options),
        "demo": lambda: demo(**({} if accelerator else on_cpu) | a.options),
        "seeds": lambda: seeds(**a.options),
        "mixed": lambda: mixed(**a.options),
        "memory": lambda: memory(a.model, **a.options),
        "soak": lambda: soak(a.soak_steps, **a.options),
    }
    found: list[Row] = []

    def report(row: Row) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)

    for part in parts:
        guarded(part, checks[part](), report)
    wrong = [row for row in found if row.get("ok") is False]
    print(f"{sum('ok' in row for row in found)} checks, {len(wrong)} not ok", flush=True)
    finish("correctness", a, found)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
