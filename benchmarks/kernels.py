"""Checks and times the attention kernels on the GPU at hand: correctness against the reference,
then TB/s or TFLOP/s.

    python -m benchmarks.kernels check decode --out results.json
    python -m benchmarks.kernels time decode extend --out results.json
    python -m benchmarks.kernels sweep decode --out results.json
    python -m benchmarks.kernels time decode --kv-dtype float8_e4m3fn
    python -m benchmarks.kernels sweep decode --head-dim 64

Calls are chained (one call's output is the next one's query) inside one jit, and each reads its own
pages of a pool larger than L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks import kernel_cases as cases
from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.quantised import SCALE_DTYPE

CALLS = 24


def seconds_a_call(
    fn: Callable[..., Array], q: Array, args: tuple[Any, ...], calls: int, repeats: int = 7
) -> float:
    """Median wall time of one of the `calls` calls that `fn` chains. `fn` is given its queries to
    overwrite, as the engine does with its state, so that buffers keep their addresses and recorded
    command buffers are replayed as they are."""
    for _ in range(4):
        q = fn(q, *args)
    jax.block_until_ready(q)
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(6):
            q = fn(q, *args)
        jax.block_until_ready(q)
        found.append((time.perf_counter() - begin) / (6 * calls))
    return statistics.median(found)


def kernel_times(fn: Callable[..., Array], q: Array, args: tuple[Any, ...]) -> dict[str, float]:
    """Mean microseconds of every kernel that `fn` launches, by name, from the profiler (which
    replays no command buffers)."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(fn(q, *args))
        for file in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                lines = plane.lines if "GPU" in plane.name else ()
                for event in (
                    e for line in lines if line.name.startswith("Stream") for e in line.events
                ):
                    found.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return {
        f"{name} x{len(times)}": round(statistics.mean(times), 2) for name, times in found.items()
    }


def page_tables(shape: cases.DecodeShape, pages: int, page_size: int) -> list[Array]:
    """Tables of different pages, as many as the pool has room for, so that calls in a row find
    nothing in the cache."""
    used = -(-shape.context // page_size)
    sets = max(1, min(CALLS, pages // (shape.B * used)))
    order = np.random.default_rng(0).permutation(pages)[: sets * shape.B * used]
    return [
        jnp.asarray(np.pad(table, ((0, 0), (0, cases.TABLE_WIDTH - used))), jnp.int32)
        for table in order.reshape(sets, shape.B, used)
    ]


def time_decode(
    shape: cases.DecodeShape, tuning: Any, pool: tuple[Array, ...], profile: bool
) -> dict[str, Any]:
    """One row of the decode table: all `shape.B` rows hold `shape.context` tokens. The pool is
    keys, values and, in 8 bits, their scales, which count as bytes read."""
    from pallas_kernels.paged_decode import mosaic_gpu

    k_pages, v_pages, *scales = pool
    P, K, C, H = k_pages.shape
    tables = page_tables(shape, P, C)
    lengths = jnp.full((shape.B,), shape.context, jnp.int32)

    @jax.jit
    def one(
        q: Array,
        k: Array,
        v: Array,
        table: Array,
        lengths: Array,
        plan: Any,
        more: dict[str, Array],
    ) -> tuple[Array, Any]:
        plan = open_plan(plan)
        out = mosaic_gpu.decode_attention(
            *(q, k, v, table, lengths),
            scale=H**-0.5,
            softcap=cases.SOFTCAPS.get(H),
            plan=plan,
            tuning=tuning,
            **more,
        )
        return out, close_plan(plan)

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(
        q: Array, k: Array, v: Array, tables: list[Array], lengths: Array, more: dict[str, Array]
    ) -> Array:
        sizes = {"heads": K * shape.group, "kv_heads": K, "head_dim": H}
        plan = mosaic_gpu.plan(lengths, **sizes, itemsize=k.dtype.itemsize, tuning=tuning)
        for i in range(CALLS):
            q, plan = one(q, k, v, tables[i % len(tables)], lengths, plan, more)
        return q

    q = jax.random.normal(jax.random.key(1), (shape.B, K * shape.group, H), jnp.float32).astype(
        jnp.bfloat16
    )
    args = (k_pages, v_pages, tables, lengths, {"scales": scales[0]} if scales else {})
    if profile:
        return {"kernels": kernel_times(chain, q, args)}
    seconds = seconds_a_call(chain, q, args, CALLS)
    moved = (
        2
        * shape.B
        * shape.context
        * K
        * (H * k_pages.dtype.itemsize + (scales[0].dtype.itemsize if scales else 0))
    )
    return {"us": round(seconds * 1e6, 2), "TB/s": round(moved / seconds / 1e12, 3)}


def time_extend(
    shape: cases.ExtendShape, tuning: Any, kv_dtype: str | None, profile: bool
) -> dict[str, Any]:
    """One row of the prefill table: `shape.queries` tokens over a cached prefix, in `shape.rows`
    equal rows."""
    from pallas_kernels.paged_extend import mosaic_gpu

    calls = 8
    total = shape.queries + shape.prefix
    pages = -(-total // shape.page)
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (pages * shape.rows, shape.K, shape.page, shape.H)
    k_pages, v_pages = (
        jax.random.normal(key, pool, jnp.float32).astype(kv_dtype or jnp.bfloat16)
        for key in keys[:2]
    )
    more = (
        {} if kv_dtype is None else {"scales": jnp.full((*pool[:2], 2, pool[2]), 0.5, SCALE_DTYPE)}
    )
    table = jnp.asarray(
        np.random.default_rng(0).permutation(pool[0]).reshape(shape.rows, pages), jnp.int32
    )
    q = jax.random.normal(
        keys[2], (shape.rows * shape.queries, shape.K * shape.group, shape.H), jnp.float32
    ).astype(jnp.bfloat16)
    starts = jnp.arange(shape.rows, dtype=jnp.int32) * shape.queries
    lengths = jnp.full((shape.rows,), shape.queries, jnp.int32)
    kv_lengths = jnp.full((shape.rows,), total, jnp.int32)

    @jax.jit
    def one(plan: Any, more: dict[str, Array], *args: Array) -> tuple[Array, Any]:
        plan = open_plan(plan)
        out = mosaic_gpu.extend_attention(
            *args, scale=shape.H**-0.5, plan=plan, tuning=tuning, **more
        )
        return out, close_plan(plan)

    sizes = {"tokens": q.shape[0], "heads": q.shape[1], "kv_heads": shape.K, "head_dim": shape.H}

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(q: Array, more: dict[str, Array], *rest: Array) -> Array:
        plan = mosaic_gpu.plan(*rest[3:], **sizes, tuning=tuning)
        for _ in range(calls):
            q, plan = one(plan, more, q, *rest)
        return q

    args = (more, k_pages, v_pages, table, starts, lengths, kv_lengths)
    if profile:
        return {"kernels": kernel_times(chain, q, args)}
    seconds = seconds_a_call(chain, q, args, calls, repeats=5)
    pairs = shape.rows * (shape.queries * shape.prefix + shape.queries * (shape.queries + 1) / 2)
    return {
        "us": round(seconds * 1e6, 2),
        "TFLOP/s": round(4 * pairs * shape.K * shape.group * shape.H / seconds / 1e12, 1),
    }


def pool_of(K: int, head_dim: int, kv_dtype: str | None) -> tuple[Array, ...]:
    """Random pages of keys and values, and their scales if they have 8 bits."""
    shape = (cases.POOL_PAGES, K, 64, head_dim)
    keys = jax.random.split(jax.random.key(0), 2)
    if kv_dtype is None:
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    made = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16).astype(kv_dtype))
    return made(keys[0]), made(keys[1]), jnp.full((shape[0], K, 2, shape[2]), 0.5, SCALE_DTYPE)


def run_decode(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    """`check` compares ragged batches; `time` times the tuned sizes; `sweep` times every
    candidate."""
    mode, kv_dtype, head_dim = options.mode, options.kv_dtype, options.head_dim
    if mode == "check":
        for case in (case for case in cases.DECODE_CHECKS if case.kv_dtype == kv_dtype):
            report({"op": "decode", "case": str(case), **cases.check_decode(case)})
        return
    for K, group in cases.DECODE_HEADS[head_dim]:
        pool = pool_of(K, head_dim, kv_dtype)
        for B, context in cases.DECODE_LOADS:
            item = cases.DecodeShape(B, context, group)
            for tuning in (
                cases.decode_tunings(pool[0].dtype.itemsize, head_dim)
                if mode == "sweep"
                else [None]
            ):
                row = {
                    "op": "decode",
                    "kv_dtype": pool[0].dtype.name,
                    "head_dim": head_dim,
                    "K": K,
                    "group": group,
                    "B": B,
                    "context": context,
                    "tuning": tuning and tuning._asdict(),
                }
                report(row | guarded(lambda: time_decode(item, tuning, pool, mode == "profile")))  # noqa: B023


def run_extend(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    """As `run_decode`, for prompt chunks, always of head dimension 128."""
    mode, kv_dtype = options.mode, options.kv_dtype
    if mode == "check":
        for case in (case for case in cases.EXTEND_CHECKS if case.kv_dtype == kv_dtype):
            report({"op": "extend", "case": str(case), **cases.check_extend(case)})
        return
    for shape in cases.EXTEND_SHAPES:
        for tuning in cases.extend_tunings() if mode == "sweep" else [None]:
            row = {
                "op": "extend",
                "kv_dtype": kv_dtype,
                **shape._asdict(),
                "tuning": tuning and tuning._asdict(),
            }
            report(row | guarded(lambda: time_extend(shape, tuning, kv_dtype, mode == "profile")))  # noqa: B023


def guarded(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurement, or why there is none: one candidate that does not compile must not end a
    sweep.
    """
    try:
        return measure()
    except Exception as error:  # a compiler refusal comes as several types
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def main() -> None:
    """Parses the command line and prints one JSON object a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("check", "time", "sweep", "profile"))
    parser.add_argument("ops", nargs="+", choices=("decode", "extend"))
    parser.add_argument(
        "--kv-dtype", choices=(cases.E4M3, cases.E5M2), help="of the pages; by default bfloat16"
    )
    parser.add_argument("--head-dim", type=int, choices=tuple(cases.DECODE_HEADS), default=128)
    parser.add_argument("--out", default="", help="also write all rows to this JSON file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            facts = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "mode": options.mode,
            }
            with open(options.out, "w") as file:
                json.dump({**facts, "rows": rows}, file, indent=1)

    for op in options.ops:
        {"decode": run_decode, "extend": run_extend}[op](options, report)


if __name__ == "__main__":
    main()
