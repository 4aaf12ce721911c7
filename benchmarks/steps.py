"""What step programs of chosen shapes take under load: which shapes the lattice should have.

    python -m benchmarks.steps --model shape:qwen2.5-7b --decode 64 192 256 --extend 512+32 1120+32
      1536+256 8192+0

`tokens+rows` are the tokens of prompts and the decode rows beside them. Every program runs on
padding rows, for which attention has nothing to do, back to back for --seconds, in turns with the
others, so that all find the device as warm; figures are medians of the turns. A program that takes
no longer with more rows fills the device no better with fewer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.record import finish, parser
from benchmarks.xla_options import prepared
from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.engine.runtime.program import Key
    from jaxllm.engine.runtime.runner import Runner

TURNS = 5


def pair(text: str) -> tuple[int, int]:
    """The shape that `tokens+rows` names."""
    tokens, _, rows = text.partition("+")
    return int(tokens), int(rows or 0)


def timed(run: Callable[[], Any], seconds: float) -> float:
    """Seconds a call when calls follow each other without a pause."""
    import jax

    jax.block_until_ready(run())
    calls, start = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - start < seconds:
        batch = max(3, calls)  # to wait is a pause, which more and more calls share
        for _ in range(batch):
            result = run()
        jax.block_until_ready(result)
        calls += batch
    return (time.perf_counter() - start) / calls


def dispatched(runner: Runner, forward: tuple[Key, np.ndarray | None]) -> Any:
    """Dispatch a forward; returns the pages, which are there when it has run."""
    runner.dispatch(*forward)
    return runner.kv


def measured(a: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a program: its tokens and decode rows, milliseconds, and rows a millisecond."""
    from jaxllm.engine.runtime.lattice import forward_key
    from jaxllm.engine.runtime.launch import Launch
    from jaxllm.engine.runtime.runner import Runner
    from jaxllm.engine.scheduling.plan import Plan
    from jaxllm.engine.startup.lattice import make_programs

    lattice, leaves, kv = prepared(a.model, options)
    buckets = chosen(lattice.buckets, a.decode, a.extend)
    programs = make_programs(replace(lattice, buckets=buckets))
    programs.compile(
        [key for key in programs.lattice if key[0] in ("decode", "extend", "update_slots")]
    )
    runner = Runner(programs, leaves, kv, [])
    empty = Plan(decodes=(), positions=(), chunks=())
    runner.run(Launch((runner.pack_slots(empty),)))
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(TURNS):
        for shape in (
            shape
            for shape in programs.shapes.buckets.extend
            if (shape.tokens, shape.decodes) in a.extend
        ):
            forward = runner.pack_slots(empty, shape)
            found.setdefault((shape.tokens, shape.decodes), []).append(
                timed(partial(dispatched, runner, forward), a.seconds)
            )
        for size in a.decode:
            found.setdefault((0, size), []).append(
                timed(partial(dispatched, runner, (forward_key(size), None)), a.seconds)
            )
    medians = [
        (tokens, size, 1e3 * statistics.median(taken)) for (tokens, size), taken in found.items()
    ]
    return [
        {"tokens": t, "decodes": size, "ms": round(ms, 3), "rows_per_ms": round((t + size) / ms, 1)}
        for t, size, ms in medians
    ]


def chosen(usual: Buckets, decode: Sequence[int], extend: Sequence[tuple[int, int]]) -> Buckets:
    """A lattice of these shapes, beside the largest decode and extend that an engine has anyway."""
    top = max(usual.extend, key=lambda shape: (shape.tokens + shape.decodes, shape.decodes))
    shapes = {top} | {
        ExtendShape(tokens, min(top.chunks, max(4, tokens // 16)), rows) for tokens, rows in extend
    }
    rows = sorted({*usual.logits, max(shape.decodes + shape.chunks for shape in shapes)})
    return replace(
        usual,
        decode=tuple(sorted({*decode, usual.decode[-1]})),
        extend=tuple(sorted(shapes)),
        logits=tuple(rows),
    )


def main() -> None:
    """Time the programs that were named."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--decode", type=int, nargs="*", default=[], metavar="ROWS")
    args.add_argument("--extend", type=pair, nargs="*", default=[], metavar="TOKENS+ROWS")
    args.add_argument("--seconds", type=float, default=0.1, help="of a turn of a program")
    a = args.parse_args()
    if not a.decode and not a.extend:
        args.error("name programs with --decode and --extend")
    rows = measured(a, {})
    for row in rows:
        print(row, flush=True)
    finish("steps", a, {"rows": rows})


if __name__ == "__main__":
    main()
