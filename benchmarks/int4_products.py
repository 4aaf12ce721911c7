"""Products with 4-bit weights on an NVIDIA GPU, beside those with bfloat16: microseconds a call.

python -m benchmarks.int4_products
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import Int4
from pallas_kernels.int4_matmul.cases import MODEL_SHAPES
from pallas_kernels.int4_matmul.mosaic_gpu import int4_matmul
from pallas_kernels.int4_matmul.packed import CHUNK, ROWS, WORDS, dequantised
from pallas_kernels.int4_matmul.plan import Tuning, tuning_of, tuning_with

GROUP = 128
COLD_BYTES = 150 << 20  # of weights that are used before one is used again


def weight(O: int, I: int, seed: int) -> Int4:  # noqa: E741
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


def compiled(op: Any, x: Any, weights: list[Any]) -> Any:
    return jax.jit(lambda x, ws: [op(x, w) for w in ws]).lower(x, weights).compile()


def microseconds(run: Any, x: Any, weights: list[Any]) -> float:
    jax.block_until_ready(run(x, weights))
    jax.block_until_ready(run(x, weights))
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < 0.05:
        for _ in range(5):
            made = run(x, weights)
        jax.block_until_ready(made)
        calls += 5
    return (time.perf_counter() - begun) / calls / len(weights) * 1e6


def dense(x: Any, w: Any) -> Any:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def tunings(T: int, O: int, I: int) -> list[Tuning]:  # noqa: E741
    own = tuning_of(T, O, I, GROUP)
    if T >= 256:
        others = [tuning_with(T, O, I, GROUP, 128, 2)]
    else:
        others = [
            tuning_with(T, O, I, GROUP, own.tokens, 2),
            own._replace(shares=max(1, own.shares // 2)),
        ]
    return [own, *(t for t in others if t != own)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int4_products", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so many")
    end = time.monotonic() + parser.parse_args().seconds
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(12) as pool:
        for name, (O, I) in MODEL_SHAPES.items():  # noqa: E741
            count = max(2, -(-COLD_BYTES // (O * I // 2)))
            weights = [weight(O, I, seed) for seed in range(count)]
            full = [
                jax.jit(partial(dequantised, columns=I, dtype=jnp.bfloat16))(w) for w in weights[:3]
            ]
            jobs = []
            for T in (1, 16, 64, 256, 2048):
                x = jax.random.normal(jax.random.key(T), (T, I), jnp.bfloat16)
                few = weights if T < 2048 else weights[:2]
                jobs.append((T, "bf16", x, full, pool.submit(compiled, dense, x, full)))
                for tuning in tunings(T, O, I):
                    op = jax.jit(partial(int4_matmul, tuning=tuning))
                    jobs.append((T, tuning, x, few, pool.submit(compiled, op, x, few)))
            for T, what, x, used, job in jobs:
                if time.monotonic() > end:
                    break
                row: dict[str, Any] = {"product": name, "tokens": T, "what": str(what)}
                try:
                    run = job.result()
                    if what != "bf16":
                        got = run(x, used)[0].astype(jnp.float32)
                        want = dense(x.astype(jnp.float32), full[0].astype(jnp.float32))
                        row["error"] = float(jnp.abs(got - want).max() / jnp.abs(want).max())
                    row["us"] = round(microseconds(run, x, used), 2)
                except Exception as error:
                    row["failed"] = str(error)[:300]
                rows.append(row)
                print(json.dumps(row), flush=True)
    Path(os.environ.get("OUT", "."), "int4_products.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
