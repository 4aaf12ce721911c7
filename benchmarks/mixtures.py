"""Times a mixture's routed feed-forward on the GPU at hand: its two grouped products, and the whole
with the grouping of tokens and the sum of their experts.

    python -m benchmarks.mixtures --shape Qwen3-30B-A3B --tokens 1 16 64 256 2048 --skew 0 1.2

`skew` is the exponent of the Zipf law by which tokens choose experts. `tb_per_s` counts the weights
of the experts that were hit, once. Calls go through weights of their own that are larger than the
L2 cache together; `error` is the largest difference from the reference, in units of its largest
value, of the first tokens.
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
from pallas_kernels.grouped_matmul import combine, group, grouped_matmul
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape, choices

LAYERS = 3  # of weights of their own; one layer of Qwen3-30B-A3B is 1.2 GB
CHECKED = 32  # tokens that are compared
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
BACKEND = "mosaic_gpu"

type Layer = tuple[Array, Array]  # gate and up [E, 2F, D], down [E, D, F]


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up."""
    return jax.nn.silu(gate) * up


def feed_forward(
    x: Array, layer: Layer, expert: Array, weight: Array, backend: str | None = None
) -> Array:
    """The routed feed-forward of one layer."""
    experts, own = layer[0].shape[0], backend or BACKEND
    groups = group(expert, experts)
    hidden = grouped_matmul(groups.rows_of(x), layer[0], groups, gating=swiglu, backend=own)
    return combine(grouped_matmul(hidden, layer[1], groups, backend=own), groups, weight)


def parts(shape: ModelShape, expert: Array) -> dict[str, Callable[..., Array]]:
    """What is timed, by name; each takes tokens, a layer and weights of choices."""
    groups = jax.jit(group, static_argnums=1)(expert, shape.experts)
    rows = groups.expert_W.shape[0] * groups.tile
    hidden = jnp.ones((rows, shape.inner), jnp.bfloat16)
    return {
        "gate_up": lambda x, layer, weight: grouped_matmul(
            groups.rows_of(x), layer[0], groups, gating=swiglu, backend=BACKEND
        ),
        "down": lambda x, layer, weight: grouped_matmul(hidden, layer[1], groups, backend=BACKEND),
        "whole": lambda x, layer, weight: feed_forward(x, layer, expert, weight),
    }


def made(shape: ModelShape) -> list[Layer]:
    """Random weights of some layers."""
    up, down = (2 * shape.inner, shape.width), (shape.width, shape.inner)

    @jax.jit
    def layer(key: Array) -> Layer:
        first, second = (
            jax.random.normal(each, (shape.experts, *size), jnp.bfloat16) / size[1] ** 0.5
            for each, size in zip(jax.random.split(key), (up, down), strict=True)
        )
        return first, second

    return [layer(jax.random.key(i)) for i in range(LAYERS)]


def rows_of(
    model: str, shape: ModelShape, tokens: Sequence[int], skews: Sequence[float], seconds: float
) -> list[dict[str, Any]]:
    """Microseconds, TB/s and TFLOP/s of every part, at every number of tokens and skew."""
    layers, found = made(shape), []
    for T in tokens:
        for skew in skews:
            rng = np.random.default_rng(T)
            expert = jnp.asarray(choices(T, shape.experts, shape.choices, skew, rng))
            weight = jnp.full(expert.shape, 1 / shape.choices, jnp.float32)
            x = jax.random.normal(jax.random.key(T), (T, shape.width), jnp.bfloat16)
            hit = len(np.unique(expert))
            for part, call in parts(shape, expert).items():
                every = jax.jit(
                    lambda x, layers, weight, call=call: [call(x, w, weight) for w in layers]
                )
                run = every.lower(x, layers, weight).compile(compiler_options=OPTIONS)
                once = lambda run=run, x=x, weight=weight: run(x, layers, weight)
                us = 1e6 * statistics.median(timed(once, seconds) for _ in range(TURNS)) / LAYERS
                row = {"model": model, "tokens": T, "skew": skew, "part": part, "experts_hit": hit}
                found.append(row | speed(shape, T, hit, part, us))
                if part == "whole":
                    found[-1]["error"] = error(once()[0], x, layers[0], expert, weight)
                print(found[-1], flush=True)
    return found


def speed(shape: ModelShape, tokens: int, hit: int, part: str, us: float) -> dict[str, float]:
    """Time and rates of a part: gate and up are two thirds of the weights, down is one."""
    numbers = shape.width * shape.inner * {"gate_up": 2, "down": 1, "whole": 3}[part]
    return {
        "us": round(us, 1),
        "tb_per_s": round(2 * hit * numbers / us / 1e6, 3),
        "tflop_per_s": round(2 * tokens * shape.choices * numbers / us / 1e6, 1),
    }


def error(got: Array, x: Array, layer: Layer, expert: Array, weight: Array) -> float:
    """The largest difference of the first tokens from the reference."""
    first = slice(0, CHECKED)
    reference = jax.jit(lambda *given: feed_forward(*given, backend="reference"))
    wanted = np.asarray(reference(x[first], layer, expert[first], weight[first]), np.float32)
    difference = np.abs(np.asarray(got[first], np.float32) - wanted)
    return round(float(difference.max() / np.abs(wanted).max()), 5)


def main() -> None:
    """Time the models that were named."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--shape", nargs="+", choices=MODEL_SHAPES, default=list(MODEL_SHAPES))
    args.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 512, 2048, 8192])
    args.add_argument("--skew", type=float, nargs="+", default=[0.0, 1.2])
    args.add_argument("--seconds", type=float, default=0.05, help="of a turn")
    a = args.parse_args()
    rows = [
        row
        for model in a.shape
        for row in rows_of(model, MODEL_SHAPES[model], a.tokens, a.skew, a.seconds)
    ]
    finish("mixtures", a, {"rows": rows})


if __name__ == "__main__":
    main()
