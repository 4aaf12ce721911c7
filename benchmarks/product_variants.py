"""Sizes of the few-row products on the GPU at hand beside XLA's product: each checked, then timed by the profiler.

python -m benchmarks.product_variants
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import kernel_cases as cases
from benchmarks.kernel_variants import GPU_THREADS, kernel_events

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


if __name__ == "__main__":
    run_products(lambda row: print(json.dumps(row), flush=True))
