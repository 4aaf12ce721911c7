"""The device's measured peaks: TB/s of copying and of reading a large buffer, TFLOP/s of bfloat16
products."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.record import finish, parser

REPEATS = 5


def seconds_a_call(fn: Callable[[Array], Array], x: Array, calls: int) -> float:
    """Time of one call: the best of several rounds of `calls`, each call fed by the one before."""
    x = jax.block_until_ready(fn(fn(x)))
    rounds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            x = fn(x)
        jax.block_until_ready(x)
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds)


def main() -> None:
    """Measure and report."""
    args = parser(__doc__)
    args.set_defaults(model="device")
    args.add_argument(
        "--gigabytes", type=float, default=8, help="size of the buffer that is copied and read"
    )
    args.add_argument("--side", type=int, default=8192, help="rows and columns of the matrices")
    args.add_argument("--calls", type=int, default=20)
    a = args.parse_args()
    count = int(a.gigabytes * 1e9) // 4
    buffer = jnp.ones(count, jnp.float32)
    copy = seconds_a_call(jax.jit(lambda x: x + 1, donate_argnums=0), buffer, a.calls)
    buffer = jnp.ones(count, jnp.float32)
    total = jax.jit(lambda scale, data: jnp.sum(data * scale) * 1e-30 + 1)
    read = seconds_a_call(lambda scale: total(scale, buffer), jnp.ones(()), a.calls)
    left, right = (
        jax.random.normal(key, (a.side, a.side), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(a.seed))
    )
    product = seconds_a_call(
        jax.jit(lambda x: (x @ right) * jnp.bfloat16(a.side**-0.5), donate_argnums=0), left, a.calls
    )
    figures = {
        "copy_tb_per_s": 8 * count / copy / 1e12,
        "read_tb_per_s": 4 * count / read / 1e12,
        "matmul_tflop_per_s": 2 * a.side**3 / product / 1e12,
    }
    finish("ceilings", a, {name: float(f"{value:.4g}") for name, value in figures.items()})


if __name__ == "__main__":
    main()
