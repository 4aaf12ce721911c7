"""Products with weights of 8 bits on an NVIDIA GPU: the kernel, cuBLASLt's product in 8 bits, and
bfloat16, in microseconds, TB/s of weights and TFLOP/s, for a layer of Qwen2.5-7B.

python -m benchmarks.fp8_products --tokens 1 64 256 --seconds 60
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.scaled_matmul import mosaic_gpu, rounded, scaled_matmul
from pallas_kernels.scaled_matmul.plan import K, Tuning, tuning_of

COLD_BYTES = 150 << 20  # of weights that are used before one is used again
TOKENS = (1, 16, 64, 128, 256, 2048, 8192)
LARGE = 2048  # tokens from which XLA is not to tune, which takes minutes
KINDS = ("rows", "blocks", "int8", *(ALONE := ("fp8 alone", "int8 alone", "int8 alone by 32")))


class Weight(NamedTuple):
    """Numbers, and scales of rows or of 128 columns."""

    values: jax.Array
    scale: jax.Array


def weight(kind: str, O: int, I: int, seed: int) -> Weight:
    """A random weight; products are of order 1."""
    plain = jax.random.normal(jax.random.key(seed), (O, I), jnp.bfloat16) * (I**-0.5)
    numbers = jnp.int8 if kind.startswith("int8") else jnp.float8_e4m3fn
    return Weight(*rounded(plain, numbers, group_of(kind, I)))


def group_of(kind: str, I: int) -> int:
    """Columns that share a scale."""
    return K if kind == "blocks" else 32 if kind.endswith("32") else I


def product(kind: str, backend: str, x: Any, w: Weight) -> Any:
    inputs = "plain" if kind in ALONE else "group" if kind == "blocks" else "token"
    group = group_of(kind, x.shape[1])
    return scaled_matmul(x, *w, group=group, inputs=inputs, backend=backend)


def tuned(kind: str, tuning: Tuning, x: Any, w: Weight) -> Any:
    group, inputs = (K, "group") if kind == "blocks" else (x.shape[1], "token")
    return mosaic_gpu.scaled_matmul(x, *w, group, inputs, tuning=tuning)


def dense(x: Any, w: Any) -> Any:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def tunings(T: int, O: int, I: int, grouped: bool) -> Iterator[Tuning]:
    """The kernel's own sizes, and neighbours of them."""
    own = tuning_of(T, O, I, grouped)
    yield own
    if own.shares > 1:
        yield own._replace(shares=1)
    if T <= 64:
        yield own._replace(warpgroups=2, shares=max(1, own.shares // 2))


def compiled(op: Callable[..., Any], x: Any, weights: list[Any]) -> Any:
    options = {"xla_gpu_autotune_level": 0} if x.shape[0] >= LARGE else {}
    run = jax.jit(lambda x, ws: [op(x, w) for w in ws])
    return run.lower(x, weights).compile(compiler_options=options)


def seconds(run: Any, x: Any, weights: list[Any]) -> float:
    """Of one product."""
    for _ in range(2):
        jax.block_until_ready(run(x, weights))
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < 0.03:
        made = [run(x, weights) for _ in range(5)]
        jax.block_until_ready(made)
        calls += 5
    return (time.perf_counter() - begun) / calls / len(weights)


def jobs(kind: str, name: str, tokens: tuple[int, ...]) -> Iterator[tuple[dict[str, Any], Any]]:
    """What to time: its description, and `(op, x, weights)`."""
    O, I = LAYER_SHAPES[name]
    count = max(2, -(-COLD_BYTES // (O * I)))
    weights = [weight(kind, O, I, seed) for seed in range(count)]
    plain = [jax.random.normal(jax.random.key(i), (O, I), jnp.bfloat16) for i in range(2)]
    for T in tokens:
        x = jax.random.normal(jax.random.key(T), (T, I), jnp.bfloat16)
        row = {"product": name, "kind": kind, "tokens": T}
        if kind in ("rows", "fp8 alone"):
            yield row | {"what": "bf16"}, (dense, x, plain)
        used = weights if T < LARGE else weights[:2]
        reference = functools.partial(product, kind, "reference")
        yield row | {"what": "XLA"}, (reference, x, used)
        if kind in ALONE:  # of 16-bit inputs; its sizes are the kernel's own
            yield (
                row | {"what": "kernel"},
                (functools.partial(product, kind, "mosaic_gpu"), x, used),
            )
            continue
        for sizes in tunings(T, O, I, kind == "blocks"):
            op = functools.partial(tuned, kind, sizes)
            yield row | {"what": "kernel", "sizes": list(sizes)}, (op, x, used)


def measured(row: dict[str, Any], job: Any, given: Any) -> dict[str, Any]:
    """The row with its time, and the error beside the reference in float32."""
    (_, x, weights), (O, I) = given, LAYER_SHAPES[row["product"]]
    try:
        run = job.result()
        if row["what"] != "bf16":
            got = run(x, weights)[0][:64].astype(jnp.float32)
            exact = functools.partial(product, row["kind"], "reference")
            want = jax.jit(exact)(x[:64].astype(jnp.float32), weights[0])
            row["error"] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        time_s = seconds(run, x, weights)
    except Exception as error:
        return row | {"failed": str(error)[:300]}
    size = O * I * (2 if row["what"] == "bf16" else 1)
    rates = {
        "us": round(time_s * 1e6, 2),
        "TB/s": round(size / time_s / 1e12, 2),
        "TFLOP/s": round(2 * row["tokens"] * O * I / time_s / 1e12, 1),
    }
    return row | rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--products", nargs="+", choices=LAYER_SHAPES, default=[*LAYER_SHAPES])
    parser.add_argument("--seconds", type=float, default=600, help="after which it ends")
    parser.add_argument("--output-json", help="file of the results")
    args = parser.parse_args()
    end, rows = time.monotonic() + args.seconds, []
    with ThreadPoolExecutor(12) as pool:
        for kind in args.kinds:
            for name in args.products:
                todo = [
                    (row, given, pool.submit(compiled, *given))
                    for row, given in jobs(kind, name, tuple(args.tokens))
                ]
                for row, given, job in todo:
                    if time.monotonic() > end:
                        job.cancel()
                        continue
                    rows.append(measured(row, job, given))
                    print(json.dumps(rows[-1]), flush=True)
    path = args.output_json or Path(os.environ.get("OUT", "."), "fp8_products.json")
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
