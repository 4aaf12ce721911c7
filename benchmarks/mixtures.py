"""Times a mixture's routed feed-forward on the GPU at hand: its two grouped products, and the whole
with the grouping of tokens and the sum of their experts.

    python -m benchmarks.mixtures --shape Qwen3-30B-A3B --tokens 1 16 64 256 2048 --skew 0 1.2
    python -m benchmarks.mixtures --shape Qwen3-30B-A3B --tokens 1 16 64 --skew 0 --parts wholes
    python -m benchmarks.mixtures --shape Qwen3-30B-A3B --numbers fp8 --parts products

A whole takes what the layer before it gave, so that layers follow each other as in a model. Wholes
are two launches for the products, or one (`mosaic_fused`), each with slots of 64, 128 and
256 columns; "whole" is two at the sizes that a model has. Results are written row by row.

`skew` is the exponent of the Zipf law by which tokens choose experts. `tb_per_s` counts the weights
of the experts that were hit, once. Calls go through weights of their own that are larger than the
L2 cache together; `error` is the largest difference from the reference, in units of its largest
value, of the first tokens.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.record import finish, parser
from benchmarks.steps import TURNS, timed
from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import (
    Experts,
    Gating,
    Groups,
    by_tile,
    combine,
    group,
    grouped_matmul,
    mosaic_fused,
    mosaic_gpu,
)
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape, choices
from pallas_kernels.grouped_matmul.plan import tuning_of
from pallas_kernels.scaled_matmul import (
    GROUP,
    ScaledExperts,
    grouped_scaled_matmul,
    rounded,
    scaled_matmul,
)

LAYERS = 3  # of weights of their own; one layer of Qwen3-30B-A3B is 1.2 GB
CHECKED = 32  # tokens that are compared
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
BACKEND = "mosaic_gpu"
COLUMNS = (64, 128, 256)  # of a slot, in the variants of the whole

# How inputs of weights are rounded
NUMBERS = {"bf16": None, "fp8": "token", "fp8 blocks": "group", "fp8 alone": "plain"}

type Maps = Array | ScaledExperts  # of all experts
type Layer = tuple[Maps, Maps]  # gate and up [E, 2F, D], down [E, D, F]


def product(
    x: Array, w: Maps, groups: Groups, gating: Gating | None = None, backend: str | None = None
) -> Array:
    """Each row times the weight of its expert."""
    return _product(x, w, groups, gating=gating, own=backend or BACKEND)


@functools.partial(jax.jit, static_argnames=("gating", "own"))  # lowered once for all layers
def _product(x: Array, w: Maps, groups: Groups, gating: Gating | None, own: str) -> Array:
    if not isinstance(w, ScaledExperts):
        return grouped_matmul(x, w, groups, gating=gating, backend=own)
    if own == "mosaic_gpu":
        return grouped_scaled_matmul(x, w, groups, gating=gating, backend="mosaic_grouped")

    def one(x: Array, e: Array) -> Array:
        form = {"group": w.group, "inputs": w.inputs}
        return scaled_matmul(x, w.values[e], w.scale[e], **form, backend=own)

    return by_tile(one, x, groups, None, gating)


def feed_forward(
    x: Array, layer: Layer, expert: Array, weight: Array, backend: str | None = None
) -> Array:
    """The routed feed-forward of one layer."""
    groups = group(expert, len(jax.tree.leaves(layer)[0]))
    hidden = product(x, layer[0], groups, SILU, backend)
    return combine(product(hidden, layer[1], groups, None, backend), groups, weight)


def variant(
    x: Array, layer: Layer, expert: Array, weight: Array, launches: int, columns: int
) -> Array:
    """The same by the Hopper kernels in one or two launches, with slots of so many columns."""
    groups = group(expert, layer[0].shape[0])
    tuning = tuning_of(groups.tile, columns)
    if launches == 1:
        weights = Experts(*layer)
        y = mosaic_fused.feed_forward(x, weights, groups, SILU, tuning=tuning)
    else:
        own = functools.partial(mosaic_gpu.grouped_matmul, groups=groups, tuning=tuning)
        hidden = own(x, layer[0], bias_EO=None, gating=SILU)
        y = own(hidden, layer[1], bias_EO=None, gating=None)
    return combine(y, groups, weight)


def wholes(expert: Array) -> dict[str, Callable[..., Array]]:
    """The routed feed-forward, by name, as a model runs it and in its variants."""
    found = {"whole": lambda x, layer, weight: feed_forward(x, layer, expert, weight)}
    if BACKEND == "mosaic_gpu":
        for launches, columns in itertools.product((1, 2), COLUMNS):
            found[f"whole, launches {launches}, columns {columns}"] = (
                lambda x, layer, weight, form=(launches, columns): variant(
                    x, layer, expert, weight, *form
                )
            )
    return found


def products(shape: ModelShape, expert: Array) -> dict[str, Callable[..., Array]]:
    """The two products, by name; each takes tokens, a layer and weights of choices."""
    groups = jax.jit(group, static_argnums=1)(expert, shape.experts)
    hidden = jnp.ones((groups.rows, shape.inner), jnp.bfloat16)
    return {
        "gate_up": lambda x, layer, weight: product(x, layer[0], groups, SILU),
        "down": lambda x, layer, weight: product(hidden, layer[1], groups),
    }


PARTS: dict[str, Callable[[ModelShape, Array], dict[str, Callable[..., Array]]]] = {
    "whole": lambda shape, expert: {"whole": wholes(expert)["whole"]},
    "wholes": lambda shape, expert: wholes(expert),
    "products": lambda shape, expert: products(shape, expert) | {"whole": wholes(expert)["whole"]},
}


def made(shape: ModelShape, numbers: str = "bf16") -> list[Layer]:
    """Random weights of some layers."""
    up, down = (2 * shape.inner, shape.width), (shape.width, shape.inner)

    @jax.jit
    def layer(key: Array) -> Layer:
        first, second = (
            jax.random.normal(each, (shape.experts, *size), jnp.bfloat16) / size[1] ** 0.5
            for each, size in zip(jax.random.split(key), (up, down), strict=True)
        )
        return held(first, numbers), held(second, numbers)

    return [layer(jax.random.key(i, impl="rbg")) for i in range(LAYERS)]  # quick to compile


def held(w: Array, numbers: str) -> Maps:
    """A weight `[E, O, I]` in this form."""
    inputs = NUMBERS[numbers]
    if inputs is None:
        return w
    size = GROUP if inputs == "group" else w.shape[2]
    return ScaledExperts(*rounded(w, jnp.float8_e4m3fn, size), size, inputs)


def rows_of(
    model: str,
    shape: ModelShape,
    tokens: Sequence[int],
    skews: Sequence[float],
    seconds: float,
    parts: str = "products",
    numbers: str = "bf16",
) -> Iterator[dict[str, Any]]:
    """Microseconds, TB/s and TFLOP/s of every part, at every number of tokens and skew."""
    layers = made(shape, numbers)
    for T, skew in itertools.product(tokens, skews):
        rng = np.random.default_rng(T)
        expert = jnp.asarray(choices(T, shape.experts, shape.choices, skew, rng))
        weight = jnp.full(expert.shape, 1 / shape.choices, jnp.float32)
        x = jax.random.normal(jax.random.key(T), (T, shape.width), jnp.bfloat16)
        hit = len(np.unique(expert))
        for part, call in PARTS[parts](shape, expert).items():
            every = jax.jit(through(call, part)).lower(x, layers, weight)
            run = every.compile(compiler_options=OPTIONS)
            once = lambda run=run, x=x, weight=weight: run(x, layers, weight)
            us = 1e6 * statistics.median(timed(once, seconds) for _ in range(TURNS)) / LAYERS
            row = {"model": model, "numbers": numbers, "tokens": T, "skew": skew, "part": part}
            row |= {"experts_hit": hit} | speed(shape, T, hit, part, us, numbers)
            if part.startswith("whole"):
                row["error"] = error(once()[0], x, layers[0], expert, weight)
            print(row, flush=True)
            yield row


def speed(
    shape: ModelShape, tokens: int, hit: int, part: str, us: float, form: str = "bf16"
) -> dict[str, float]:
    """Time and rates of a part: gate and up are two thirds of the weights, down is one."""
    numbers = shape.width * shape.inner * {"gate_up": 2, "down": 1}.get(part, 3)
    return {
        "us": round(us, 1),
        "tb_per_s": round((2 if form == "bf16" else 1) * hit * numbers / us / 1e6, 3),
        "tflop_per_s": round(2 * tokens * shape.choices * numbers / us / 1e6, 1),
    }


def through(call: Callable[..., Array], part: str) -> Callable[..., list[Array]]:
    """A part of all layers, one after the other: a whole takes what the one before it gave."""

    def run(x: Array, layers: list[Layer], weight: Array) -> list[Array]:
        found: list[Array] = []
        for layer in layers:
            given = found[-1] if found and part.startswith("whole") else x
            found.append(call(given, layer, weight))
        return found

    return run


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
    args.add_argument("--numbers", nargs="+", choices=NUMBERS, default=["bf16"])
    args.add_argument("--seconds", type=float, default=0.05, help="of a turn")
    args.add_argument("--parts", choices=PARTS, default="products")
    a = args.parse_args()
    if a.parts == "wholes" and a.numbers != ["bf16"]:
        args.error("--parts wholes compares forms of 16-bit products: leave --numbers out")
    rows = []
    for model, numbers in itertools.product(a.shape, a.numbers):
        own = (a.tokens, a.skew, a.seconds, a.parts, numbers)
        for row in rows_of(model, MODEL_SHAPES[model], *own):
            rows.append(row)
            finish("mixtures", a, rows)


if __name__ == "__main__":
    main()
