"""Variants of the decode and draw kernels on the GPU at hand: each checked, then timed, by the profiler and by the clock.

    python -m benchmarks.kernel_variants --out results [--only launch decode trace draw products]

Everything is compiled first, in threads. Times are of the kernels alone ("us": the profiler's median, which replays no command buffers)
and of a chain of calls ("wall": the clock, a call, with what lies between two kernels).
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import kernel_cases as cases
from benchmarks.kernels import CALLS, seconds_a_call
from pallas_kernels import draw as draws
from pallas_kernels.draw import cases as draw_cases
from pallas_kernels.paged_decode import mosaic_flash, mosaic_gpu

Tuning = mosaic_gpu.Tuning
BASE = mosaic_gpu.default_tuning(128, 64)
DECODE_CHECKS = (
    cases.Check(4, 7, 128, 64, cases.RAGGED),
    cases.Check(8, 4, 128, 16, tuple(range(1, 2000, 37))),
    cases.Check(2, 16, 128, 32, (100, 0, 9000, 1031), window=2500, softcap=30.0),
)
GPU_THREADS = 8


class Timed(NamedTuple):
    """One program to time: `run(state) -> state` makes `calls` kernel calls whose names contain `kernel`."""

    facts: dict[str, Any]
    compiled: Callable[[Any], Any]
    state: Any
    kernel: str
    calls: int
    moved: float


def decode_variants(B: int, K: int) -> Iterable[Tuning]:
    """What is worth a try for B rows and K heads."""
    yield BASE
    if B == 1:
        yield from (BASE._replace(cluster=c, min_tiles=4 * c, swapped=s) for c in (8, 16) for s in (False, True))
        if K == 4:
            yield from (BASE._replace(min_tiles=n) for n in (1, 4))
            yield BASE._replace(cluster=4, min_tiles=16, swapped=True)
            yield BASE._replace(cluster=8, min_tiles=16, swapped=True)
    elif B == 16:
        yield from (BASE._replace(cluster=c, min_tiles=2 * c, swapped=s) for c in (1, 2) for s in (False, True))
        if K == 4:
            yield BASE._replace(cluster=4, min_tiles=8, swapped=True)
            yield BASE._replace(cluster=2, min_tiles=4, stages=4, swapped=True)
    else:
        yield BASE._replace(cluster=1, min_tiles=2)
        yield from (BASE._replace(cluster=c, min_tiles=2 * c, swapped=True) for c in (1, 2))


def compiled_all(makers: list[Callable[[], Any]], report: Callable[[dict[str, Any]], None]) -> list[Any]:
    """What the makers make; one that fails is reported and left out."""

    def guarded(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # a compiler refusal comes as several types
            return error

    with ThreadPoolExecutor(GPU_THREADS) as pool:
        found = list(pool.map(guarded, makers))
    for error in (x for x in found if isinstance(x, Exception)):
        report({"failed to compile": f"{type(error).__name__}: {str(error)[:400]}"})
    return [x for x in found if not isinstance(x, Exception)]


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


def time_all(items: list[Timed], report: Callable[[dict[str, Any]], None]) -> None:
    """Wall time of each, then all once more under the profiler, whose events are told apart by their number."""
    rows = []
    for item in items:
        try:
            wall = seconds_a_call(lambda s, _, run=item.compiled: run(s), item.state, (None,), item.calls, repeats=5)  # type: ignore[misc]
            rows.append(item.facts | {"wall": round(wall * 1e6, 2), "wall TB/s": round(item.moved / wall / 1e12, 3)})
        except Exception as error:
            report(item.facts | {"error": f"{type(error).__name__}: {str(error)[:400]}"})
            raise
    print(f"# clock done, {len(rows)} programs", flush=True)
    states = [jnp.full(item.state.shape, 0.01, item.state.dtype) for item in items]  # the first ones were donated

    def everything() -> list[Any]:
        return [jax.block_until_ready(item.compiled(state)) for item, state in zip(items, states, strict=True)]

    events = kernel_events(everything)
    at = 0
    for item, row in zip(items, rows, strict=True):
        mine = [us for _, name, us in events[at:] if item.kernel in name][: item.calls]
        used = 0
        for count, (_, name, _us) in enumerate(events[at:], 1):
            used += item.kernel in name
            if used == item.calls:
                at += count
                break
        if len(mine) == item.calls:
            us = statistics.median(mine)
            row |= {"us": round(us, 2), "worst us": round(max(mine), 2), "TB/s": round(item.moved / us / 1e6, 3)}
        else:
            row |= {"kernels seen": len(mine), "names": sorted({name for _, name, _ in events})[:12]}
        report(row)


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
        for tuning, chain in made:
            q = jax.random.normal(jax.random.key(1), (B, K * group, H), jnp.float32).astype(pool[0].dtype)
            facts = {"op": "decode", "K": K, "group": group, "B": B, "context": context, "tuning": tuning._asdict()}
            kernel = "decode_cluster" if tuning.cluster else "decode_attend"
            yield Timed(facts, lambda q, chain=chain, args=args: chain(q, *args), q, kernel, CALLS, 4 * B * context * K * H)


def check_variants(report: Callable[[dict[str, Any]], None]) -> set[tuple[int, bool]]:
    """The (cluster, swapped) that are wrong on a check or do not compile. Shares are small, so that rows cross cuts."""
    tunings = {t._replace(stages=BASE.stages, min_tiles=4): t for B in (1, 16, 64) for t in decode_variants(B, 4) if t.cluster}
    jobs = [(check, tuning) for tuning in tunings for check in DECODE_CHECKS[: 3 if tuning.cluster == 2 else 1]]
    found = compiled_all([functools.partial(check_program, *job) for job in jobs], report)
    bad = set()
    for check, tuning, run in found:
        facts = run()
        report({"op": "decode check", "case": str(check)[:90], "tuning": tuning._asdict(), **facts})
        if not facts["ok"]:
            bad.add((tuning.cluster, tuning.swapped))
    done = [(check, tuning) for check, tuning, _ in found]
    return bad | {(tuning.cluster, tuning.swapped) for check, tuning in jobs if (check, tuning) not in done}


def check_program(check: cases.Check, tuning: Tuning) -> tuple[cases.Check, Tuning, Callable[[], dict[str, Any]]]:
    """Three calls on one plan beside the reference, and what is left in its flags."""
    from pallas_kernels.paged_decode import reference

    rng, k, v, table = cases.pools(check, 0)
    q = jnp.asarray(rng.normal(size=(len(check.lengths), check.K * check.group, check.H)), check.dtype)
    sinks = jnp.asarray(rng.normal(size=check.K * check.group), jnp.float32)
    args = (q, k, v, table, jnp.asarray(check.lengths, jnp.int32), sinks)
    kw = {"scale": check.H**-0.5, "window": check.window, "softcap": check.softcap}

    def ours(q, k, v, table, lengths, sinks):  # type: ignore[no-untyped-def]
        plan = mosaic_gpu.plan(lengths, kv_heads=check.K, head_dim=check.H, page_size=check.page, window=check.window, tuning=tuning)
        one = jax.jit(lambda q: mosaic_gpu.decode_attention(q, k, v, table, lengths, **kw, sinks=sinks, plan=plan, tuning=tuning))
        calls = []
        for _ in range(3):
            calls.append(one(q))
            q = q + 0 * calls[-1]  # one after another
        return calls, plan.lanes_LF[:, 10:]

    def theirs(q, k, v, table, lengths, sinks):  # type: ignore[no-untyped-def]
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        return reference.decode_attention(q, k, v, table, lengths, **kw, sinks=sinks)

    runs = [jax.jit(f).lower(*args).compile() for f in (ours, theirs)]

    def run() -> dict[str, Any]:
        calls, flags = runs[0](*args)
        wanted = runs[1](*args)
        facts = [cases.difference(out, wanted) for out in calls]
        same = all(bool(jnp.array_equal(out, calls[0])) for out in calls)
        left = int(jnp.abs(flags).sum())
        worst = max(facts, key=lambda f: f["error"] if f["error"] == f["error"] else np.inf)
        return worst | {"same again": same, "flags left": left, "ok": all(f["ok"] for f in facts) and left == 0}

    return check, tuning, run


def run_launch(report: Callable[[dict[str, Any]], None]) -> None:
    """What a Mosaic kernel costs that does nothing but copy a few numbers, by its shared memory and clusters."""

    def program(kilobytes: int, cluster: int) -> Timed:
        def nothing(x_ref, o_ref, big):  # type: ignore[no-untyped-def]
            block = lax.axis_index("block") if cluster == 1 else lax.axis_index("block") * cluster + lax.axis_index("rank")
            o_ref[block] = x_ref[block] + 1
            del big

        clusters = {"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}
        kernel = plgpu.kernel(
            nothing,
            out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
            scratch_types=[plgpu.SMEM((kilobytes, 256), jnp.int32)],
            grid=(128 // cluster,),
            grid_names=("block",),
            num_threads=2,
            thread_name="wg",
            **clusters,
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(x: Array) -> Array:
            one = jax.jit(kernel)
            for _ in range(CALLS):
                x = one(x)
            return x

        x = jnp.zeros((128,), jnp.int32)
        made = chain.lower(x).compile()
        return Timed({"op": "launch", "KB": kilobytes, "cluster": cluster}, made, x, "nothing", CALLS, 0)

    makers = [functools.partial(program, *job) for job in ((1, 1), (150, 1), (150, 8), (150, 16))]
    time_all(compiled_all(makers, report), report)


def run_decode(report: Callable[[dict[str, Any]], None]) -> None:
    """Checks, then all judged loads."""
    bad = check_variants(report)
    report({"clusters left out": sorted(bad)})
    for K, group in cases.DECODE_HEADS:
        shape = (cases.POOL_PAGES, K, 64, 128)
        pool = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 2))
        for B, contexts in ((1, [1024, 2048]), (16, [2048, 8192]), (64, [2048, 8192]), (256, [1024])):
            tunings = [t for t in decode_variants(B, K) if (t.cluster, t.swapped) not in bad]
            made = compiled_all([functools.partial(decode_chain, B, group, t, pool) for t in tunings], report)  # type: ignore[arg-type]
            time_all(list(decode_items(B, contexts, group, made, pool)), report)  # type: ignore[arg-type]


def run_trace(report: Callable[[dict[str, Any]], None], folder: pathlib.Path) -> None:
    """Where the time goes inside a kernel: its own profiler's scopes, of the last of three calls, in cycles from the first block on."""
    options = mosaic_flash.Spec.options
    for B, context, tuning in (
        (1, 2048, BASE),
        (1, 2048, BASE._replace(cluster=8, min_tiles=32)),
        (1, 2048, BASE._replace(cluster=8, min_tiles=32, swapped=True)),
        (16, 2048, BASE._replace(cluster=2, min_tiles=4)),
    ):
        place = folder / f"trace-{B}x{context}-cluster{tuning.cluster}-{'swapped' if tuning.swapped else 'plain'}"
        place.mkdir(parents=True, exist_ok=True)
        params = plgpu.CompilerParams(approx_math=True, profile_space=300, profile_dir=str(place), profile_bounds_check=True)
        mosaic_flash.Spec.options = property(lambda _, params=params: {"compiler_params": params})  # type: ignore[method-assign,assignment]
        try:
            pages = -(-context // 64)
            pool = jax.random.normal(jax.random.key(0), (2, B * pages * 3, 4, 64, 128), jnp.bfloat16)
            tables = jnp.arange(3 * B * pages, dtype=jnp.int32).reshape(3, B, pages)

            def three(q: Array, k: Array, v: Array, tables: Array, B: int = B, context: int = context, tuning: Tuning = tuning) -> Array:
                lengths = jnp.full((B,), context, jnp.int32)
                plan = mosaic_gpu.plan(lengths, kv_heads=4, head_dim=128, page_size=64, tuning=tuning)
                for i in range(3):
                    q = mosaic_gpu.decode_attention(q, k, v, tables[i], lengths, scale=0.1, plan=plan, tuning=tuning)
                return q

            q = jnp.ones((B, 28, 128), jnp.bfloat16)
            run = jax.jit(three)
            for _ in range(2):  # the second time everything is warm
                for file in place.glob("*.json"):
                    file.unlink()
                jax.block_until_ready(run(q, pool[0], pool[1], tables))
                jax.effects_barrier()
            file = max(place.glob("*-trace.json"), key=lambda f: f.name)
            report(
                {
                    "op": "trace",
                    "B": B,
                    "context": context,
                    "cluster": tuning.cluster,
                    "swapped": tuning.swapped,
                    **scopes(json.loads(file.read_text())),
                }
            )
        except Exception as error:
            report({"op": "trace", "B": B, "cluster": tuning.cluster, "error": f"{type(error).__name__}: {str(error)[:400]}"})
        finally:
            mosaic_flash.Spec.options = options  # type: ignore[method-assign]


def scopes(trace: dict[str, Any]) -> dict[str, Any]:
    """Per scope: number, mean length, and when the first begins and the last ends: cycles, beginnings of blocks in ns."""
    begun: dict[int, list[tuple[str, float]]] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    events = trace["traceEvents"]
    if not events:
        return {"scopes": {}}
    zero = min(e["ts"] for e in events)
    for e in events:
        stack = begun.setdefault(e["tid"], [])
        if e["ph"] == "B":
            stack.append((e["name"], e["ts"]))
        elif stack:
            name, since = stack.pop()
            found.setdefault(name, []).append((since - zero, e["ts"] - zero))
    table = {
        name: {
            "n": len(spans),
            "mean": round(1e3 * statistics.mean(b - a for a, b in spans)),
            "longest": round(1e3 * max(b - a for a, b in spans)),
            "first begins": round(1e3 * min(a for a, _ in spans)),
            "last ends": round(1e3 * max(b for _, b in spans)),
        }
        for name, spans in found.items()
    }
    return {"scopes": table}


def run_draw(report: Callable[[dict[str, Any]], None]) -> None:
    """Allowed sets on eight rows of each option, then times at 16, 64 and 256 rows."""
    V = 152064
    options = {
        "top_k top_p": draw_cases.Options(temperature=0.8, top_k=50, top_p=0.9),
        "top_k": draw_cases.Options(top_k=50),
        "top_p": draw_cases.Options(temperature=0.8, top_p=0.9),
        "plain": draw_cases.Options(),
    }
    kinds = ("flat", "spread", "head", "clustered")
    run = jax.jit(functools.partial(draws.draw, backend="mosaic_gpu"))
    tops = [draw_cases.Options(top_k=k, top_p=p) for k in (1, 3, 50, 200, 4000) for p in (0.9, 1.0)]
    mixed = [*draw_cases.OPTIONS.values(), *tops]
    for kind in kinds:
        given = np.repeat(draw_cases.logits(kind, 1, V, seed=3), len(mixed), axis=0)
        drawn = [np.asarray(run(jnp.asarray(given), draw_cases.rows_of(mixed, given, seed))) for seed in range(8)]
        allowed = [draw_cases.possible(given[0], option, slack=draw_cases.ROUNDING) for option in mixed]
        wrong = [(seed, row) for seed, tokens in enumerate(drawn) for row, token in enumerate(tokens) if not allowed[row][token]]
        report({"op": "draw check", "logits": kind, "ok": not wrong, "wrong": wrong[:5]})
    calls = 12

    def program(B: int) -> tuple[int, Any]:
        def chain(key: Array, logits: Array, rows: Any) -> Array:
            for _ in range(calls):
                token = run(logits, draws.DrawRows(rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B, key, rows.banned_BK))
                key = key + 1 + (token[:, None] * 0).astype(jnp.uint32)
            return key

        rows = jax.tree.map(jnp.asarray, draw_cases.rows_of([draw_cases.Options()] * B, np.zeros((B, 1), np.float32)))
        logits = jax.ShapeDtypeStruct((B, V), jnp.float32)
        return B, jax.jit(chain, donate_argnums=0).lower(rows.key_B2, logits, rows).compile()

    given = {kind: jnp.asarray(draw_cases.logits(kind, 256, V, seed=1)) for kind in kinds[:3]}
    for B, made in compiled_all([functools.partial(program, B) for B in (16, 64, 256)], report):
        items = []
        for kind in kinds[:3]:
            for name, option in options.items():
                rows = jax.tree.map(jnp.asarray, draw_cases.rows_of([option] * B, np.zeros((B, 1), np.float32), seed=5))
                facts = {"op": "draw", "B": B, "logits": kind, "options": name}
                run_it = functools.partial(
                    lambda key, made, logits, rows: made(key, logits, rows), made=made, logits=given[kind][:B], rows=rows
                )
                items.append(Timed(facts, run_it, jnp.asarray(np.asarray(rows.key_B2).copy()), "draw_token", calls, 4 * B * V))
        time_all(items, report)


PRODUCTS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}


def product_tunings(rows: int, O: int, K: int) -> Iterable[Any]:  # noqa: E741
    """XLA's product (None), the modelled sizes, and neighbours of these."""
    from pallas_kernels.matmul import plan

    yield None
    made = plan.tuning_of(plan.row_class(rows), O, K)
    yield made
    for split in {1, 2, 4, 7} - {made.split}:
        n = max(8, min(256, -(-O * split // 132 // 8) * 8))
        k = 128
        stages = plan.stages_of(plan.row_class(rows), n, k)
        if stages >= 3:
            yield made._replace(n=n, k=k, stages=min(stages, 6), split=split, groups=1, cluster=1)


def run_products(report: Callable[[dict[str, Any]], None]) -> None:
    """The 7B's products of few rows, over weights beyond L2: all kernels of a product, by the profiler; error beside XLA's float32 sums."""
    from pallas_kernels.matmul import mosaic_gpu as products

    def program(name: str, M: int, tuning: Any) -> tuple[str, int, Any, Any]:
        def multiply(x: Array, w: Array) -> Array:
            return jnp.einsum("ti,oi->to", x, w) if tuning is None else products.matmul(x, w, tuning=tuning)

        one = jax.jit(multiply)
        O, K = PRODUCTS[name]  # noqa: E741
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), *[(O, K)] * 4)]
        made = jax.jit(lambda x, *weights: [one(x, w) for w in weights]).lower(*shapes).compile()
        return name, M, tuning, made

    jobs = [(name, M, t) for M in (1, 8, 16) for name, (O, K) in PRODUCTS.items() for t in product_tunings(M, O, K)]  # noqa: E741
    found = compiled_all([functools.partial(program, *job) for job in jobs], report)
    for name, (O, K) in PRODUCTS.items():  # noqa: E741
        weights = [jax.random.normal(key, (O, K), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]
        for _, M, tuning, made in (f for f in found if f[0] == name):
            x = jax.random.normal(jax.random.key(9), (M, K), jnp.bfloat16)
            wanted = jnp.einsum("ti,oi->to", x, weights[-1], preferred_element_type=jnp.float32)
            try:
                facts = cases.difference(made(x, *weights)[-1], wanted)
                events = [e for _ in range(2) for e in kernel_events(lambda x=x, made=made, w=weights: made(x, *w))]
            except Exception as error:
                facts, events = {"error": f"{type(error).__name__}: {str(error)[:300]}", "ok": False}, []
            us = sum(us for _, name, us in events if "Memcpy" not in name) / 8
            facts |= {
                "us": round(us, 2),
                "TB/s": round(2 * O * K / us / 1e6, 3) if us else 0,
                "kernels": sorted({n[:60] for _, n, _ in events}),
            }
            report({"op": "product", "of": name, "M": M, "tuning": tuning and tuning._asdict(), **facts})


def main() -> None:
    """Parses the command line and prints one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for variants.json and the kernels' own traces")
    parser.add_argument(
        "--only", nargs="+", choices=("launch", "decode", "trace", "draw", "products"), default=("launch", "decode", "draw", "trace")
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def report(row: dict[str, Any]) -> None:
        rows.append(row | {"at": round(time.perf_counter() - begin, 1)})
        print(json.dumps(rows[-1]), flush=True)
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        (options.out / "variants.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))

    parts: dict[str, Callable[[], None]] = {
        "launch": lambda: run_launch(report),
        "decode": lambda: run_decode(report),
        "draw": lambda: run_draw(report),
        "trace": lambda: run_trace(report, options.out),
        "products": lambda: run_products(report),
    }
    for name in options.only:
        try:
            parts[name]()
        except Exception as error:  # one part must not take the others with it
            report({"part": name, "error": f"{type(error).__name__}: {str(error)[:600]}"})


if __name__ == "__main__":
    main()
