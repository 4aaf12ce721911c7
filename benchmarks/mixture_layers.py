"""Times the half of a layer that is a mixture of experts on the GPU at hand: residual sum and norm,
router, routing, products and the sum of each token's experts, layer after layer.

    python -m benchmarks.mixture_layers --shape Qwen3-30B-A3B --tokens 1 16 64 256 --skew 0
    python -m benchmarks.mixture_layers --numbers fp8 --variants now "warpgroups 2"

"now" is what a model runs. Variants say what they do otherwise:

- one launch: both products in one launch (`mosaic_fused`), or two launches.
- columns N: two launches with slots of so many columns. warpgroups 2: so many that multiply.
- added before: a launch of its own adds up each token's experts, in place of the norm that follows.

Experts of 8 bits have two launches, and slots of 128 columns; other variants are refused.

`skew` is the exponent of the Zipf law by which experts are preferred: a bias of the router.
`tiles` in use are the mean over layers: as many as experts that were hit, unless some need two.
`tb_per_s` counts the weights of each once. `launches` are those of a layer in the compiled program;
`error` is the largest difference from "now", in units of its largest value.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks import mixtures
from benchmarks.mixtures import NUMBERS, OPTIONS, Maps
from benchmarks.record import finish, parser
from benchmarks.routing import launches
from benchmarks.steps import TURNS, timed
from pallas_kernels.add_norm import mosaic_gpu as norms
from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import (
    Experts,
    Groups,
    find_one_launch,
    mosaic_fused,
    mosaic_gpu,
    rows_for,
)
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.grouped_matmul.plan import PROCESSORS, K, tuning_of
from pallas_kernels.parts import WeightedRows, whole
from pallas_kernels.route import Rule
from pallas_kernels.route import mosaic_gpu as routes
from pallas_kernels.scaled_matmul import ScaledExperts, mosaic_grouped
from pallas_kernels.target import Target

LAYERS = 6  # of which every third has the same weights, larger than the L2 cache
EPS = 1e-6


class Variant(NamedTuple):
    """What is done otherwise than now."""

    launches: int | None = None
    columns: int = K
    warpgroups: int | None = None
    added_before: bool = False


VARIANTS = {
    "now": Variant(),
    "one launch": Variant(launches=1),
    "two launches": Variant(launches=2),
    "added before": Variant(added_before=True),
    "columns 128": Variant(launches=2, columns=128),
    "columns 256": Variant(launches=2, columns=256),
    "warpgroups 2": Variant(launches=2, warpgroups=2),
    "one launch, columns 128": Variant(launches=1, columns=128),
}


class Layer(NamedTuple):
    """Weights of a norm, a router with a bias, and experts."""

    norm_D: Array
    router_ED: Array
    bias_E: Array
    gate_up: Maps
    down: Maps


def made(shape: ModelShape, numbers: str) -> list[Layer]:
    """Random weights of some layers, whose routers have the bias of skew 1; experts are preferred
    in another order in each."""

    @jax.jit
    def router(key: Array) -> tuple[Array, Array]:
        size = shape.experts, shape.width
        rank_E = jax.random.permutation(key, shape.experts) + 1
        weight_ED = jax.random.normal(key, size, jnp.bfloat16) / shape.width**0.5
        return weight_ED, -jnp.log(rank_E.astype(jnp.float32))

    norm_D = jnp.ones((shape.width,), jnp.bfloat16)
    return [
        Layer(norm_D, *router(jax.random.key(i)), gate_up, down)
        for i, (gate_up, down) in enumerate(mixtures.made(shape, numbers))
    ]


# Jitted, so that a kernel is lowered once, not for every layer
@functools.partial(jax.jit, static_argnames="variant")
def normed(
    x_TD: Array, rows: WeightedRows | None, weight_D: Array, variant: Variant
) -> tuple[Array, Array]:
    """The residual stream with rows added, and its norm."""
    delta_TD = jnp.zeros_like(x_TD) if rows is None else rows
    if variant.added_before:
        delta_TD = whole(delta_TD)
    return norms.add_norm(x_TD, delta_TD, weight_D, EPS)


@functools.partial(jax.jit, static_argnames=("rule", "variant"))
def routed(
    normed_TD: Array, layer: Layer, rule: Rule, variant: Variant
) -> tuple[WeightedRows, Array]:
    """What is to be added to the residual stream, and the tiles in use."""
    logit_TE = lax.dot_general(
        normed_TD, layer.router_ED, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    groups, weight_TK = routes.route(logit_TE + layer.bias_E, None, rule)
    y_PD = experts(normed_TD, layer, groups, variant)
    return rows_for(y_PD, groups, weight_TK), groups.used[-1]


def experts(x_TD: Array, layer: Layer, groups: Groups, variant: Variant) -> Array:
    """Rows of all tiles. Raises ValueError where the numbers have no such variant."""
    gate_up, down = layer.gate_up, layer.down
    if isinstance(gate_up, ScaledExperts) or isinstance(down, ScaledExperts):
        if variant.launches == 1 or variant.columns != K:
            raise ValueError("experts of 8 bits have two launches, and slots of one size")
        product = functools.partial(
            mosaic_grouped.grouped_scaled_matmul, groups=groups, warpgroups=variant.warpgroups
        )
        return product(product(x_TD, gate_up, gating=SILU), down)
    tuning = tuning_of(groups.tile, variant.columns, variant.warpgroups)
    given = x_TD, Experts(gate_up, down), groups, SILU
    chosen = 2 if find_one_launch(Target.gpu("9.0", PROCESSORS), *given) is None else 1
    if (variant.launches or chosen) == 1:
        return mosaic_fused.feed_forward(*given, tuning=tuning)
    multiply = functools.partial(
        mosaic_gpu.grouped_matmul, groups=groups, bias_EO=None, tuning=tuning
    )
    return multiply(multiply(x_TD, gate_up, gating=SILU), down, gating=None)


def chained(x_TD: Array, layers: list[Layer], rule: Rule, variant: Variant) -> tuple[Array, Array]:
    """Tokens after `LAYERS` layers, and how many tiles were in use in each."""
    rows, tiles = None, []
    for layer in itertools.islice(itertools.cycle(layers), LAYERS):
        x_TD, normed_TD = normed(x_TD, rows, layer.norm_D, variant=variant)
        rows, used = routed(normed_TD, layer, rule=rule, variant=variant)
        tiles.append(used)
    return normed(x_TD, rows, layers[0].norm_D, variant=variant)[1], jnp.stack(tiles)


def compiled(x_TD: Array, layers: list[Layer], rule: Rule, names: list[str]) -> dict[str, Any]:
    """The programs of variants, or why there is none, compiled side by side."""

    def program(name: str) -> Any:
        try:
            run = jax.jit(lambda x, layers: chained(x, layers, rule, VARIANTS[name]))
            return run.lower(x_TD, layers).compile(compiler_options=OPTIONS)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(program, names), strict=True))


def rows_of(
    row: dict[str, Any], layers: list[Layer], shape: ModelShape, a: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """`row`, which has tokens and skew, for each variant."""
    tokens, rule = row["tokens"], Rule(shape.choices)
    layers = [layer._replace(bias_E=row["skew"] * layer.bias_E) for layer in layers]
    x_TD = jax.random.normal(jax.random.key(tokens), (tokens, shape.width), jnp.bfloat16)
    programs = compiled(x_TD, layers, rule, list(dict.fromkeys(["now", *a.variants])))
    taken: dict[str, list[float]] = {}
    ready = {name: run for name, run in programs.items() if not isinstance(run, str)}
    for _ in range(TURNS):
        for name, run in ready.items():
            once = functools.partial(run, x_TD, layers)
            taken.setdefault(name, []).append(timed(once, a.seconds))
    wanted, used = (np.asarray(each, np.float32) for each in ready["now"](x_TD, layers))
    for name, run in programs.items():
        row = row | {"variant": name}
        if isinstance(run, str):
            yield row | {"refused": run}
            continue
        us = 1e6 * statistics.median(taken[name]) / LAYERS
        hit = float(used.mean())
        size = 3 * shape.width * shape.inner * (2 if row["numbers"] == "bf16" else 1)
        got = np.asarray(run(x_TD, layers)[0], np.float32)
        yield row | {
            "us": round(us, 1),
            "tiles": hit,
            "tb_per_s": round(size * hit / us / 1e6, 3),
            "launches": round(launches(run.as_text()) / LAYERS, 2),
            "error": round(float(np.abs(got - wanted).max() / np.abs(wanted).max()), 5),
        }


def main() -> None:
    """Time the models that were named."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--shape", nargs="+", choices=MODEL_SHAPES, default=["Qwen3-30B-A3B"])
    args.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    args.add_argument("--skew", type=float, nargs="+", default=[0.0])
    args.add_argument("--numbers", nargs="+", choices=NUMBERS, default=["bf16"])
    args.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args.add_argument("--seconds", type=float, default=0.02, help="of a turn")
    a = args.parse_args()
    rows = []
    for model, numbers in itertools.product(a.shape, a.numbers):
        layers = made(MODEL_SHAPES[model], numbers)
        for tokens, skew in itertools.product(a.tokens, a.skew):
            given = {"model": model, "numbers": numbers, "tokens": tokens, "skew": skew}
            for row in rows_of(given, layers, MODEL_SHAPES[model], a):
                print(row, flush=True)
                rows.append(row)
            finish("mixture_layers", a, rows)


if __name__ == "__main__":
    main()
