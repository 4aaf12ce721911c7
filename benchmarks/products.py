"""Times an MLP's gated product on the GPU at hand: the kernel, and XLA's product with the
activation after it.

    python -m benchmarks.products --weight 37888x3584 --rows 64 128 192 256 2048
    python -m benchmarks.products --weight 28672x3584 --activation gelu

A weight is O x I, gate and up together. Calls go through weights of their own that are larger than
the L2 cache together, x and weights are normal; `error` is the largest difference from the float32
product, in units of its largest value.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.record import finish, parser
from benchmarks.steps import TURNS, timed
from pallas_kernels.gated_matmul import GELU, SILU, Gating, gated_matmul, reference

BYTES = 1 << 30  # of all weights of one shape
GATINGS = {"silu": SILU, "gelu": GELU}
UNTUNED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


def shape(text: str) -> tuple[int, int]:
    """(O, I) of `OxI`."""
    outputs, inputs = text.split("x")
    return int(outputs), int(inputs)


def seconds_a_call(
    run: Callable[..., Any], xs: Sequence[Array], ws: Sequence[Array], seconds: float
) -> float:
    """Median of some turns of `seconds` each, a product."""
    return statistics.median(timed(lambda: run(xs, ws), seconds) for _ in range(TURNS)) / len(ws)


def plain(x: Array, w: Array, gating: Gating) -> Array:
    """Product, then activation, rounded between."""
    return gating(*jnp.split(jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), 2, axis=1))


def kernel(x: Array, w: Array, gating: Gating) -> Array:
    """The one that the device has."""
    return gated_matmul(x, w, gating=gating, backend="mosaic_gpu")


def rows_of(
    weight: tuple[int, int], rows: Sequence[int], seconds: float, gating: Gating = SILU
) -> list[dict[str, Any]]:
    """Microseconds, TFLOP/s and GB/s of weight of every way, at every number of rows."""
    O, I = weight
    count = max(2, BYTES // (2 * O * I))
    make = jax.jit(lambda key: jax.random.normal(key, (O, I), jnp.bfloat16) / I**0.5)
    ws = [make(jax.random.key(i)) for i in range(count)]
    ways: list[tuple[str, Callable[..., Array], dict[str, Any]]] = [
        ("xla", plain, {}),
        ("xla untuned", plain, UNTUNED),
    ]
    found = []
    for M in rows:
        xs = [
            jax.random.normal(jax.random.key(count + i), (M, I), jnp.bfloat16) for i in range(count)
        ]
        wanted = np.asarray(reference.gated_matmul(xs[0], ws[0], gating), np.float32)
        for how, product, options in [*ways, ("kernel", kernel, UNTUNED)]:
            every = jax.jit(
                lambda xs, ws, product=product: [
                    product(x, w, gating) for x, w in zip(xs, ws, strict=True)
                ]
            )
            run = every.lower(xs, ws).compile(compiler_options=options)
            error = float(
                np.abs(np.asarray(run(xs, ws)[0], np.float32) - wanted).max() / np.abs(wanted).max()
            )
            us = 1e6 * seconds_a_call(run, xs, ws, seconds)
            speed = {
                "tflop_per_s": round(2 * M * O * I / us / 1e6),
                "gb_per_s": round(2 * O * I / us / 1e3),
            }
            found.append(
                {
                    "weight": f"{O}x{I}",
                    "rows": M,
                    "how": how,
                    "us": round(us, 1),
                    **speed,
                    "error": round(error, 5),
                }
            )
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Time the products that were named."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--weight", type=shape, nargs="+", default=[(37888, 3584)], metavar="OxI")
    args.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[16, 64, 96, 128, 160, 192, 224, 256, 512, 640, 1024, 1792, 2048],
    )
    args.add_argument("--activation", choices=GATINGS, default="silu")
    args.add_argument("--seconds", type=float, default=0.05, help="of a turn")
    a = args.parse_args()
    finish(
        "products",
        a,
        {
            "rows": [
                row
                for weight in a.weight
                for row in rows_of(weight, a.rows, a.seconds, GATINGS[a.activation])
            ]
        },
    )


if __name__ == "__main__":
    main()
