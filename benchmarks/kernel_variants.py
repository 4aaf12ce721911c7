"""Variants of the decode and draw kernels on the GPU at hand, timed by the profiler and by the clock, most important first.

    python -m benchmarks.kernel_variants --out results [--only decode draw] [--seconds 90]

The work is done in a process of its own, which says what it is about to run and ends itself when that takes 15 seconds, as blocks of a
kernel that wait for each other never end. Then that variant is reported and another process goes on with the rest. Times are of kernels
alone ("us": the profiler's median, which replays no command buffers) as soon as a load's programs are there, and, when all are, of chains
of dependent calls ("wall": the clock, a call, with what lies between two kernels).
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import kernel_cases as cases
from benchmarks.kernels import CALLS, seconds_a_call
from pallas_kernels import draw as draws
from pallas_kernels.draw import cases as draw_cases
from pallas_kernels.paged_decode import mosaic_gpu

Tuning = mosaic_gpu.Tuning
BASE = mosaic_gpu.default_tuning(128, 64)
GPU_THREADS = 8
RUN_SECONDS = 15  # of one variant, before its process ends itself
COMPILE_SECONDS = 60
V = 152064
DRAW_CALLS = 12
DRAW_OPTIONS = {
    "top_k top_p": draw_cases.Options(temperature=0.8, top_k=50, top_p=0.9),
    "top_k": draw_cases.Options(top_k=50),
    "top_p": draw_cases.Options(temperature=0.8, top_p=0.9),
    "plain": draw_cases.Options(),
}
DRAW_KINDS = ("flat", "head")

type Report = Callable[[dict[str, Any]], None]


class Timed(NamedTuple):
    """One program to time: `run(state) -> state` makes `calls` kernel calls whose names contain `kernel`, and read `moved` bytes each."""

    facts: dict[str, Any]
    run: Callable[[Any], Any]
    state: Callable[[], Any]
    kernel: str
    calls: int
    moved: float

    @property
    def name(self) -> str:
        return json.dumps(self.facts)


def decode_variants(B: int, K: int) -> Iterable[Tuning]:
    """What is worth a try for B rows and K heads."""
    yield BASE
    if B == 1:
        # A row of 2,048 tokens is 32 tiles, so it lies in one cluster of 8 and is cut in two by clusters of 4.
        yield from (BASE._replace(cluster=c, min_tiles=4 * c, swapped=True) for c in (8, 4))
    else:
        yield from (BASE._replace(cluster=c, min_tiles=2 * c, swapped=True) for c in ((1, 2) if B == 16 else (1,)))


def kernel_events(run: Callable[[], Any]) -> list[tuple[int, str, float]]:
    """(start ns, name, µs) of every kernel that runs meanwhile."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                lines = plane.lines if "GPU" in plane.name else ()
                events = (e for line in lines if line.name.startswith("Stream") for e in line.events)
                found += [(e.start_ns, e.name, e.duration_ns / 1e3) for e in events]
    return sorted(found)


class Progress:
    """What the process at work tells the one that watches it."""

    def __init__(self, done: list[str]) -> None:
        self.ended = {name.removeprefix("!") for name in done if name.startswith("!")}  # never again
        self.profiled = set(done) - {"!" + name for name in self.ended}

    def begin(self, what: str) -> None:
        print(f"BEGIN {what}", flush=True)
        faulthandler.dump_traceback_later(COMPILE_SECONDS if what.startswith("compile") else RUN_SECONDS, exit=True)

    def report(self, row: dict[str, Any]) -> None:
        print(f"FOUND {json.dumps(row)}", flush=True)

    def profile(self, items: list[Timed], off: dict[str, float]) -> None:
        """Times all of them by the profiler, whose events are told apart by their number."""
        for item in items:
            self.begin(item.name)
            jax.block_until_ready(item.run(item.state()))
        self.begin(f"profile of {len(items)}")
        events = kernel_events(lambda: [jax.block_until_ready(item.run(item.state())) for item in items])
        at = 0
        for item in items:
            mine = [(i, us) for i, (_, name, us) in enumerate(events[at:], at + 1) if item.kernel in name][: item.calls]
            if len(mine) == item.calls:
                at = mine[-1][0]
                us = statistics.median(us for _, us in mine)
                row = {"us": round(us, 2), "worst us": round(max(us for _, us in mine), 2), "TB/s": round(item.moved / us / 1e6, 3)}
            else:
                row = {"kernels seen": len(mine), "names": sorted({name for _, name, _ in events})[:12]}
            self.report(item.facts | row | ({"off": off[item.name]} if item.name in off else {}))
            print(f"DONE {item.name}", flush=True)

    def clock(self, items: list[Timed]) -> None:
        """Wall time of each; nothing may compile meanwhile, as that holds Python."""
        for item in items:
            self.begin(item.name)
            wall = seconds_a_call(lambda s, _, run=item.run: run(s), item.state(), (None,), item.calls, repeats=5)  # type: ignore[misc]
            self.report(item.facts | {"wall": round(wall * 1e6, 2), "wall TB/s": round(item.moved / wall / 1e12, 3)})


def decode_chain(B: int, group: int, tuning: Tuning, pool: tuple[Array, Array]) -> tuple[Tuning, Any]:
    """A chain of calls as in `benchmarks.kernels`, compiled for any context."""
    k_pages, v_pages = pool
    _, K, C, H = k_pages.shape
    one = jax.jit(
        lambda q, k, v, table, lengths, plan: mosaic_gpu.decode_attention(q, k, v, table, lengths, scale=H**-0.5, plan=plan, tuning=tuning)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(q: Array, k: Array, v: Array, tables: list[Array], lengths: Array) -> Array:
        plan = mosaic_gpu.plan(lengths, kv_heads=K, head_dim=H, page_size=C, tuning=tuning)
        for table in tables:
            q = one(q, k, v, table, lengths, plan)
        return q

    q = jax.ShapeDtypeStruct((B, K * group, H), k_pages.dtype)
    table = jax.ShapeDtypeStruct((B, cases.TABLE_WIDTH), jnp.int32)
    return tuning, chain.lower(q, k_pages, v_pages, [table] * CALLS, jax.ShapeDtypeStruct((B,), jnp.int32)).compile()


def decode_items(B: int, contexts: list[int], group: int, made: list[tuple[Tuning, Any]], pool: tuple[Array, Array]) -> Iterable[Timed]:
    """Every compiled chain with every context; each call reads its own pages as far as there are pages."""
    P, K, C, H = pool[0].shape
    for context in contexts:
        used = -(-context // C)
        sets = max(1, min(CALLS, P // (B * used)))
        order = np.random.default_rng(0).permutation(P)[: sets * B * used].reshape(sets, B, used)
        found = [jnp.asarray(np.pad(table, ((0, 0), (0, cases.TABLE_WIDTH - used))), jnp.int32) for table in order]
        args = (*pool, [found[i % sets] for i in range(CALLS)], jnp.full((B,), context, jnp.int32))

        def state(N: int = K * group) -> Array:
            return jax.random.normal(jax.random.key(1), (B, N, H), jnp.float32).astype(pool[0].dtype)

        for tuning, chain in made:
            facts = {"op": "decode", "K": K, "group": group, "B": B, "context": context, **tuning._asdict()}
            kernel = "decode_cluster" if tuning.cluster else "decode_attend"
            yield Timed(facts, lambda q, chain=chain, args=args: chain(q, *args), state, kernel, CALLS, 4 * B * context * K * H)


def run_decode(progress: Progress) -> None:
    """All judged loads, most judged heads first."""
    pools = {
        K: tuple(jax.random.normal(key, (cases.POOL_PAGES, K, 64, 128), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 2))
        for K, _ in cases.DECODE_HEADS
    }
    loads = [(K, group, B, list(contexts)) for K, group in sorted(cases.DECODE_HEADS) for B, contexts in DECODE_LOADS]
    everything: list[Timed] = []
    with ThreadPoolExecutor(GPU_THREADS) as threads:
        futures = [
            [threads.submit(decode_chain, B, group, tuning, pools[K]) for tuning in decode_variants(B, K)]  # type: ignore[arg-type]
            for K, group, B, _ in loads
        ]
        for (K, group, B, contexts), chains in zip(loads, futures, strict=True):
            progress.begin(f"compile decode of {B} rows, {K} heads")
            made = []
            for chain in chains:
                try:
                    made.append(chain.result())
                except Exception as error:  # a compiler refusal comes as several types
                    progress.report({"K": K, "B": B, "failed to compile": f"{type(error).__name__}: {str(error)[:400]}"})
            found = decode_items(B, contexts, group, made, pools[K])  # type: ignore[arg-type]
            items = [item for item in found if item.name not in progress.ended]
            everything += items
            new = [item for item in items if item.name not in progress.profiled]
            if new:
                progress.profile(new, differences(items, progress))
    progress.clock(everything)


def differences(items: list[Timed], progress: Progress) -> dict[str, float]:
    """How far each chain's output is from that of the first with its context, as a part of the largest number."""
    wanted: dict[int, Array] = {}
    found = {}
    for item in items:
        progress.begin(item.name)
        answer = item.run(item.state()).astype(jnp.float32)
        first = wanted.setdefault(item.facts["context"], answer)
        found[item.name] = round(float(jnp.abs(answer - first).max() / jnp.abs(first).max()), 5)
    return found


def check_draw(progress: Progress) -> None:
    """Every draw lies in its row's allowed set."""
    run = jax.jit(functools.partial(draws.draw, backend="mosaic_gpu"))
    mixed = [*draw_cases.OPTIONS.values(), *[draw_cases.Options(top_k=k, top_p=p) for k in (1, 3, 50, 200, 4000) for p in (0.9, 1.0)]]
    for kind in ("flat", "spread", "head", "clustered"):
        given = np.repeat(draw_cases.logits(kind, 1, V, seed=3), len(mixed), axis=0)
        drawn = [np.asarray(run(jnp.asarray(given), draw_cases.rows_of(mixed, given, seed))) for seed in range(6)]
        allowed = [draw_cases.possible(given[0], option, slack=draw_cases.ROUNDING) for option in mixed]
        wrong = [(seed, row) for seed, tokens in enumerate(drawn) for row, token in enumerate(tokens) if not allowed[row][token]]
        progress.report({"op": "draw check", "logits": kind, "ok": not wrong, "wrong": wrong[:5]})


def draw_chain(B: int) -> Any:
    """A chain of draws, each by a key that the one before has drawn, so that none can be left out."""
    one = jax.jit(functools.partial(draws.draw, backend="mosaic_gpu"))

    def chain(key: Array, logits: Array, rows: Any) -> Array:
        for _ in range(DRAW_CALLS):
            token = one(logits, dataclasses.replace(rows, key_B2=key))
            key = key + (2 * token + 1).astype(jnp.uint32)[:, None]
        return key

    rows = draw_cases.rows_of([draw_cases.Options()] * B, np.zeros((B, 1), np.float32))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    return jax.jit(chain, donate_argnums=0).lower(shapes.key_B2, jax.ShapeDtypeStruct((B, V), jnp.float32), shapes).compile()


def draw_items(B: int, made: Any, given: dict[str, Array]) -> Iterable[Timed]:
    """Every kind of logits with every kind of options."""
    for kind, logits in given.items():
        for name, option in DRAW_OPTIONS.items():
            rows = jax.tree.map(jnp.asarray, draw_cases.rows_of([option] * B, np.zeros((B, 1), np.float32), seed=5))
            facts = {"op": "draw", "B": B, "logits": kind, "options": name}
            mine = logits[:B]
            state = functools.partial(jnp.array, rows.key_B2, copy=True)
            yield Timed(facts, lambda key, mine=mine, rows=rows: made(key, mine, rows), state, "draw_token", DRAW_CALLS, 4 * B * V)


def run_draw(progress: Progress) -> None:
    """Times at 64 and 256 rows, then checks."""
    progress.begin("compile draws")
    given = {kind: jnp.asarray(draw_cases.logits(kind, 256, V, seed=1)) for kind in DRAW_KINDS}
    everything: list[Timed] = []
    with ThreadPoolExecutor(GPU_THREADS) as threads:
        for B, future in {B: threads.submit(draw_chain, B) for B in (64, 256)}.items():
            progress.begin(f"compile draw of {B} rows")
            items = [item for item in draw_items(B, future.result(), given) if item.name not in progress.ended]
            everything += items
            new = [item for item in items if item.name not in progress.profiled]
            if new:
                progress.profile(new, {})
    progress.clock(everything)
    progress.begin("compile draw checks")
    check_draw(progress)


PARTS = {"decode": run_decode, "draw": run_draw}
DECODE_LOADS = ((1, (2048, 1024)), (16, (2048, 8192)), (64, (8192, 2048)), (256, (1024,)))


def work(part: str, done: list[str]) -> None:
    """One part, in a process that ends itself when a step takes too long. Says on its output what it begins and what it has found."""
    progress = Progress(done)
    progress.begin("compile")
    PARTS[part](progress)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Parses the command line and prints one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder for variants.json")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--seconds", type=float, default=90, help="after which no process is started and the one at work ends")
    parser.add_argument("--work", nargs="+", metavar=("PART", "DONE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work[0], options.work[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()

    def report(row: dict[str, Any]) -> None:
        rows.append(row | {"at": round(time.perf_counter() - start, 1)})
        print(json.dumps(rows[-1]), flush=True)
        (options.out / "variants.json").write_text(json.dumps({"jax": jax.__version__, "rows": rows}, indent=1))

    for part in options.only:
        done: list[str] = []
        while (left := options.seconds - (time.perf_counter() - start)) > 0 and not supervise(part, done, left, report):
            pass


def supervise(part: str, done: list[str], seconds: float, report: Report) -> bool:
    """Runs a process for what is not done. Whether nothing is left to do: it ended well, or while it did not run a variant."""
    command = ["timeout", "--signal=KILL", str(seconds), sys.executable, "-m", "benchmarks.kernel_variants", "--work", part, *done]
    began = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True) if not line.startswith("FOUND ") else report(json.loads(line.removeprefix("FOUND ")))
            if line.startswith("BEGIN "):
                began = line.removeprefix("BEGIN ").strip()
            elif line.startswith("DONE "):
                done.append(line.removeprefix("DONE ").strip())
    if process.returncode == 0:
        return True
    report({"part": part, "ended": process.returncode, "while": began})
    done.append("!" + began)
    return not began.startswith("{")


if __name__ == "__main__":
    main()
