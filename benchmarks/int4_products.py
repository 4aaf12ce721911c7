"""Products with 4-bit weights on an NVIDIA GPU, by tokens and path, beside those with bfloat16:
microseconds of a call, for a layer of Qwen2.5-7B.

python -m benchmarks.int4_products --tokens 1 256 8192 --seconds 60
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_matmul import SILU, gated_matmul
from pallas_kernels.gated_matmul import find as find_gated
from pallas_kernels.int4_matmul import Int4
from pallas_kernels.int4_matmul.mosaic_dense import dense
from pallas_kernels.int4_matmul.mosaic_gpu import int4_matmul
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, WORDS, dequantised
from pallas_kernels.int4_matmul.plan import (
    FEW_TOKENS,
    Tuning,
    tuning_of,
    tuning_with,
    with_columns,
)
from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.target import Target

GROUP = 128
COLD_BYTES = 150 << 20  # of weights that are used before one is used again
TOKENS = (1, 16, 256, 512, 2048, 4096, 8192)
COMPARED = 64  # tokens whose products are compared with float32's
MANY = 2048  # tokens from which the whole weight is tried
TURN_SECONDS, TURNS = 0.02, 3  # of calls that are timed together
TILES = ((128, 3), (128, 2), (256, 2))
# As the engine's programs are compiled; tuning would disturb what is timed beside it
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

type Op = Callable[[Any, Any], Any]


class Way(NamedTuple):
    """A way to compute a product, or the weight in 16 bits alone.

    Attributes:
      name: says also the sizes of a kernel.
      op: computes it of x and a weight.
      plain: whether that weight has 16 bits.
      activated: whether gate and up are activated.
      converts: whether the weight in 16 bits is all that is made.
    """

    name: str
    op: Op
    plain: bool = False
    activated: bool = False
    converts: bool = False


class Job(NamedTuple):
    """A path that is compiled meanwhile: the row of its results, what it is called with, the
    product and the weight that are right, and the program to come."""

    row: dict[str, Any]
    path: Way
    given: tuple[Any, Any]
    exact: tuple[Any, Any]
    compiled: Future[Any]


def weight(O: int, I: int, seed: int) -> Int4:
    """Random numbers, scales and zero points."""
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    words = jax.random.bits(a, (O // ROWS, I // CHUNK, *WORDS), jnp.uint32)
    shape = (O // ROWS, I // GROUP, ROWS)
    scales = jax.random.uniform(b, shape, jnp.float32, 0.5, 1.5) / (5 * I**0.5)
    zeros = jax.random.randint(c, shape, 4, 12)
    return Int4(
        jax.lax.bitcast_convert_type(words, jnp.int32),
        scales.astype(jnp.bfloat16),
        zeros.astype(jnp.bfloat16),
        None,
        O,
        GROUP,
    )


def product(x: Any, w: Any) -> Any:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def activation(y: Any) -> Any:
    return SILU(*jnp.split(y, 2, axis=1))


def gated(x: Any, w: Any) -> Any:
    """As the engine computes gate and up."""
    backend = find_gated(Target.of(jax.devices()[0]), x, w, SILU)
    if backend is None:
        return activation(product(x, w))
    return gated_matmul(x, w, gating=SILU, backend=backend)


def tunings(T: int, O: int, I: int) -> Iterator[Tuning]:
    """The kernel's own sizes, and others."""
    own = tuning_of(T, O, I, GROUP)
    yield own
    others = (
        [with_columns(T, O, I, GROUP, own.tokens, own.warpgroups, c) for c in (128, 256)]
        if T <= FEW_TOKENS
        else [tuning_with(T, O, I, GROUP, *tile) for tile in TILES]
    )
    yield from (sizes for sizes in others if sizes != own)


def paths(name: str, T: int) -> Iterator[Way]:
    """The ways to compute a product of T tokens."""
    O, I = LAYER_SHAPES[name]
    own, pair = tuning_of(T, O, I, GROUP), name == "gate_up" and T > FEW_TOKENS
    yield Way("bf16", product, plain=True)
    for sizes in tunings(T, O, I):
        yield Way(f"kernel {tuple(sizes)}", functools.partial(int4_matmul, tuning=sizes))
    if T >= MANY:
        yield Way("to 16 bits", lambda x, w: dense(w, x), converts=True)
        yield Way("whole weight", lambda x, w: product(x, dense(w, x)))
    if pair:
        yield Way("bf16", gated, plain=True, activated=True)
        yield Way(
            f"kernel {tuple(own)}",
            lambda x, w: activation(int4_matmul(x, w, tuning=own)),
            activated=True,
        )
    if pair and T >= MANY:
        yield Way("whole weight", lambda x, w: gated(x, dense(w, x)), activated=True)


def compiled(op: Op, x: Any, weights: list[Any]) -> Any:
    own = jax.jit(op)
    run = jax.jit(lambda x, ws: [own(x, w) for w in ws])
    return run.lower(x, weights).compile(compiler_options=OPTIONS)


def microseconds(run: Any, x: Any, weights: list[Any]) -> float:
    """The least of some turns, in each of which calls wait for nothing but the device."""

    def turn(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            made = run(x, weights)
        jax.block_until_ready(made)
        return (time.perf_counter() - begun) / calls

    turn(1)
    calls = max(2, int(TURN_SECONDS / turn(2)))
    return min(turn(calls) for _ in range(TURNS)) / len(weights) * 1e6


def measured(
    path: Way, run: Any, x: Any, weights: list[Any], exact: Any, whole: Any
) -> dict[str, Any]:
    """The time of a call, and the error of the first tokens beside float32, or of the first rows of
    a weight beside the `whole` one."""
    got = run(x, weights)[0][:COMPARED].astype(jnp.float32)
    want = whole if path.converts else activation(exact) if path.activated else exact
    want = want[: len(got)].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return {"error": round(error, 5), "us": round(microseconds(run, x, weights), 2)}


def jobs_of(name: str, args: argparse.Namespace, pool: ThreadPoolExecutor) -> Iterator[Job]:
    """Have all paths of a product compiled."""
    O, I = LAYER_SHAPES[name]
    make = jax.jit(functools.partial(weight, O, I))
    weights = [make(seed) for seed in range(max(2, -(-COLD_BYTES // (O * I // 2))))]
    plain = jax.jit(functools.partial(dequantised, columns=I, dtype=jnp.bfloat16))
    full = [plain(w) for w in weights[:3]]
    x = jax.random.normal(jax.random.key(0), (max(args.tokens), I), jnp.bfloat16)
    exact = jnp.matmul(x[:COMPARED].astype(jnp.float32), full[0].T, precision="highest")
    for T in args.tokens:
        for path in paths(name, T):
            if any(word in path.name for word in args.paths):
                own = full if path.plain else weights
                given = x[:T], own if T < MANY else own[:1]
                what = {"product": name, "tokens": T, "path": path.name}
                job = pool.submit(compiled, path.op, *given)
                yield Job(what | {"activated": path.activated}, path, given, (exact, full[0]), job)


def rows_of(jobs: list[Job], seconds: float) -> Iterator[dict[str, Any]]:
    """Time one path after the other once all are compiled: to trace others would hold the
    interpreter meanwhile. What is not compiled after three quarters of the time is left out."""
    end = time.monotonic() + seconds
    wait([job.compiled for job in jobs], 0.75 * seconds)
    for job in jobs:
        if job.compiled.cancel() or not job.compiled.done() or time.monotonic() > end:
            continue
        try:
            yield job.row | measured(job.path, job.compiled.result(), *job.given, *job.exact)
        except Exception as error:
            yield job.row | {"failed": str(error)[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int4_products", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--products", nargs="+", choices=LAYER_SHAPES, default=[*LAYER_SHAPES])
    parser.add_argument("--paths", nargs="+", default=[""], help="words of the paths' names")
    parser.add_argument("--seconds", type=float, default=600, help="after which it ends")
    parser.add_argument("--output-json", help="file of the results")
    args = parser.parse_args()
    rows = []
    with ThreadPoolExecutor(12) as pool:
        jobs = [job for name in args.products for job in jobs_of(name, args, pool)]
        for row in rows_of(jobs, args.seconds):
            rows.append(row)
            print(json.dumps(row), flush=True)
    path = args.output_json or Path(os.environ.get("OUT", "."), "int4_products.json")
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
