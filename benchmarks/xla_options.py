"""Which XLA options make each program fastest on the device at hand: the table in
`jaxllm/engine/runtime/compilation/tuned/`.

    python -m benchmarks.xla_options --model shape:qwen2.5-7b --and-model shape:qwen3-0.6b --write

Every program of the lattice is timed on padding rows, for which attention has nothing to do: what
differs is XLA's own choice of kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options

if TYPE_CHECKING:
    import jax

    from jaxllm.cache.arrays import KVCache
    from jaxllm.engine.startup.lattice import Lattice

CANDIDATES: tuple[dict[str, Any], ...] = (
    {},
    {"xla_gpu_enable_triton_gemm": False},
    {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True},
)
GAIN = 0.99  # of the time without options: what is nearer is noise
ROUNDS = 5
ALL_ROWS = 2**20

type Times = Mapping[tuple[str, int], Sequence[float]]  # (kind, rows) -> seconds of each candidate


def choose(models: Sequence[Times], candidates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Table entries. The first candidate is the default; another one is chosen where the models
    take least time with it, in the mean of their ratios, and clearly less. A program's entry covers
    the row counts down to the next smaller program's."""
    entries: list[dict[str, Any]] = []
    for program in sorted({program for times in models for program, _ in times}):
        low = 1
        rows = sorted({rows for times in models for found, rows in times if found == program})
        for high in rows:
            measured = [times[program, high] for times in models if (program, high) in times]
            means = [
                sum(seconds[i] / seconds[0] for seconds in measured) / len(measured)
                for i in range(len(candidates))
            ]
            best = means.index(min(means))
            options = candidates[best] if means[best] < GAIN else candidates[0]
            top = ALL_ROWS if high == rows[-1] else high
            if entries and entries[-1]["program"] == program and entries[-1]["options"] == options:
                entries[-1]["rows"][1] = top
            else:
                entries.append({"program": program, "rows": [low, top], "options": options})
            low = high + 1
    return [entry for entry in entries if entry["options"]]


def prepared(model: str, options: dict[str, Any]) -> tuple[Lattice, tuple[jax.Array, ...], KVCache]:
    """What programs of a model run on: the decisions of a start, weights and pages."""
    from jaxllm.cache.arrays import Zeros
    from jaxllm.config import EngineConfig
    from jaxllm.engine.startup.device_client import reserve_memory
    from jaxllm.engine.startup.lattice import plan_lattice
    from jaxllm.engine.startup.memory_plan import first_plan
    from jaxllm.engine.startup.model_plan import plan_model
    from jaxllm.engine.startup.weight_source import WeightSource
    from jaxllm.engine.startup.wishes import read_wishes
    from jaxllm.mesh import make_mesh

    config = EngineConfig(**(engine_options(model) | options))
    reserve_memory(config.gpu_memory_utilization)
    wishes = read_wishes(config)
    with wishes.files:
        plan = plan_model(wishes, [make_mesh(config.tensor_parallel_size)])
        lattice = plan_lattice(plan, first_plan(plan))
        leaves = WeightSource([plan], files=wishes.files).read()
    return lattice, leaves, Zeros()(lattice.pages())


def measure(
    model: str, options: dict[str, Any], candidates: Sequence[dict[str, Any]]
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every forward program with every candidate."""
    import jax

    from jaxllm.engine.runtime.compilation.executables import Executables
    from jaxllm.engine.runtime.compilation.xla_options import Entry, XlaOptions
    from jaxllm.engine.runtime.runner import Runner
    from jaxllm.engine.scheduling.buckets import ExtendShape
    from jaxllm.engine.startup.lattice import make_programs

    lattice, leaves, kv = prepared(model, options)
    found: dict[tuple[str, int], list[float]] = {}
    for candidate in candidates:
        table = XlaOptions(
            tuple(Entry(kind, 0, ALL_ROWS, candidate) for kind in ("decode", "extend"))
        )
        programs = make_programs(lattice, Executables(table, platform=lattice.platform))
        programs.compile_all()
        runner = Runner(programs, leaves, kv, [])
        times: dict[tuple[str, int], float] = {}
        for _ in range(ROUNDS):
            runner.warm_up()
            for shape, seconds in runner.seconds.items():
                key = (
                    ("extend", shape.tokens + shape.decodes)
                    if isinstance(shape, ExtendShape)
                    else ("decode", int(str(shape)))
                )
                times[key] = min(seconds, times.get(key, seconds))
        for key, seconds in times.items():
            found.setdefault(key, []).append(seconds)
        kv = runner.kv
    jax.tree.map(lambda x: x.delete(), (leaves, kv))
    return found


def main() -> None:
    """Measure every model, print the times, and with --write replace the device's table."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument(
        "--and-model", action="append", default=[], help="a further model to choose for"
    )
    args.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of engine options"
    )
    args.add_argument(
        "--candidates",
        type=json.loads,
        default=CANDIDATES,
        help="JSON list of XLA options, the default first",
    )
    args.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=Path("jaxllm/engine/runtime/compilation/tuned"),
        help="folder of the tables",
    )
    a = args.parse_args()
    figures: dict[str, Any] = {"ms": {}}
    models = []
    for model in (a.model, *a.and_model):
        times = measure(model, a.options, a.candidates)
        models.append(times)
        figures["ms"][model] = {
            f"{kind} {rows}": [round(1e3 * s, 3) for s in seconds]
            for (kind, rows), seconds in sorted(times.items())
        }
    figures["programs"] = choose(models, a.candidates)
    if a.write:
        write(a.write, figures)
    finish("xla-options", a, figures)


def write(folder: Path, figures: dict[str, Any]) -> Path:
    """The table of this process's device, with what was measured."""
    import jax

    from jaxllm.engine.runtime.compilation.xla_options import table_path

    kind = jax.devices()[0].device_kind
    path = table_path(kind, folder)
    path.write_text(
        json.dumps(
            {"device": kind, "measured": figures["ms"], "programs": figures["programs"]}, indent=1
        )
        + "\n"
    )
    return path


if __name__ == "__main__":
    main()
