"""Times the half of a layer that is a mixture of experts on the GPU at hand: residual sum and norm,
router, routing, products and the sum of each token's experts, layer after layer.

    python -m benchmarks.mixture_layers --shape Qwen3-30B-A3B --tokens 1 16 64 256 --skew 0

"now" is what a model runs. Variants say what they do otherwise:

- one launch: both products in one launch (`mosaic_fused`).
- columns N: slots of so many columns. warpgroups 2: so many warpgroups that multiply.
- added before: a launch of its own adds up each token's experts, in place of the norm that follows.

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

from benchmarks.mixtures import OPTIONS, swiglu
from benchmarks.record import finish, parser
from benchmarks.routing import launches
from benchmarks.steps import TURNS, timed
from pallas_kernels.add_norm import mosaic_gpu as norms
from pallas_kernels.grouped_matmul import Experts, Groups, mosaic_fused, mosaic_gpu, rows_for
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.grouped_matmul.plan import Tuning, tuning_of
from pallas_kernels.parts import WeightedRows, whole
from pallas_kernels.route import Rule
from pallas_kernels.route import mosaic_gpu as routes

LAYERS = 6  # of which every third has the same weights, larger than the L2 cache
WEIGHTS = 3
EPS = 1e-6


class Variant(NamedTuple):
    """What is done otherwise than now."""

    one_launch: bool = False
    columns: int = 64
    warpgroups: int | None = None
    added_before: bool = False


VARIANTS = {
    "now": Variant(),
    "added before": Variant(added_before=True),
    "columns 128": Variant(columns=128),
    "columns 256": Variant(columns=256),
    "warpgroups 2": Variant(warpgroups=2),
    "one launch": Variant(one_launch=True),
    "one launch, columns 128": Variant(one_launch=True, columns=128),
}


class Layer(NamedTuple):
    """Weights of a norm, a router with a bias, and experts."""

    norm_D: Array
    router_ED: Array
    bias_E: Array
    gate_up_EOD: Array
    down_EDF: Array


def made(shape: ModelShape, skew: float) -> list[Layer]:
    """Random weights of some layers; experts are preferred in another order in each."""

    @jax.jit
    def layer(key: Array) -> Layer:
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        keys = jax.random.split(key, 4)
        rank_E = jax.random.permutation(keys[3], shape.experts) + 1
        D, F, E = shape.width, shape.inner, shape.experts
        return Layer(
            norm_D=jnp.ones((D,), jnp.bfloat16),
            router_ED=normal(keys[0], (E, D)) / D**0.5,
            bias_E=-skew * jnp.log(rank_E.astype(jnp.float32)),
            gate_up_EOD=normal(keys[1], (E, 2 * F, D)) / D**0.5,
            down_EDF=normal(keys[2], (E, D, F)) / F**0.5,
        )

    return [layer(jax.random.key(i)) for i in range(WEIGHTS)]


def tuning_for(tile: int, variant: Variant) -> Tuning:
    """The sizes of the products' kernels."""
    return tuning_of(tile, variant.columns, variant.warpgroups)


def normed(
    x_TD: Array, rows: WeightedRows | None, layer: Layer, variant: Variant
) -> tuple[Array, Array]:
    """The residual stream with rows added, and its norm."""
    delta_TD = jnp.zeros_like(x_TD) if rows is None else rows
    if variant.added_before:
        delta_TD = whole(delta_TD)
    return norms.add_norm(x_TD, delta_TD, layer.norm_D, EPS)


def half(
    x_TD: Array, rows: WeightedRows | None, layer: Layer, rule: Rule, variant: Variant
) -> tuple[Array, WeightedRows, Array]:
    """One layer's half: the residual stream, what is to be added to it, and the tiles in use."""
    x_TD, normed_TD = normed(x_TD, rows, layer, variant)
    logit_TE = lax.dot_general(
        normed_TD, layer.router_ED, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    groups, weight_TK = routes.route(logit_TE + layer.bias_E, None, rule)
    y_PD = experts(normed_TD, layer, groups, variant)
    return x_TD, rows_for(y_PD, groups, weight_TK), groups.used[-1]


def experts(x_TD: Array, layer: Layer, groups: Groups, variant: Variant) -> Array:
    """Rows of all tiles."""
    tuning = tuning_for(groups.tile, variant)
    if variant.one_launch:
        weights = Experts(layer.gate_up_EOD, layer.down_EDF)
        return mosaic_fused.feed_forward(x_TD, weights, groups, swiglu, tuning=tuning)
    product = functools.partial(
        mosaic_gpu.grouped_matmul, groups=groups, bias_EO=None, tuning=tuning
    )
    hidden_PF = product(x_TD, layer.gate_up_EOD, gating=swiglu)
    return product(hidden_PF, layer.down_EDF, gating=None)


def chained(x_TD: Array, layers: list[Layer], rule: Rule, variant: Variant) -> tuple[Array, Array]:
    """Tokens after `LAYERS` layers, and how many tiles were in use in each."""
    rows, tiles = None, []
    for layer in itertools.islice(itertools.cycle(layers), LAYERS):
        x_TD, rows, used = half(x_TD, rows, layer, rule, variant)
        tiles.append(used)
    return normed(x_TD, rows, layers[0], variant)[1], jnp.stack(tiles)


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
    model: str, shape: ModelShape, a: argparse.Namespace, tokens: int, skew: float
) -> Iterator[dict[str, Any]]:
    """A row for each variant."""
    layers, rule = made(shape, skew), Rule(shape.choices)
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
        row = {"model": model, "tokens": tokens, "skew": skew, "variant": name}
        if isinstance(run, str):
            yield row | {"refused": run}
            continue
        us = 1e6 * statistics.median(taken[name]) / LAYERS
        hit = float(used.mean())
        numbers = 3 * shape.width * shape.inner
        got = np.asarray(run(x_TD, layers)[0], np.float32)
        yield row | {
            "us": round(us, 1),
            "tiles": hit,
            "tb_per_s": round(2 * hit * numbers / us / 1e6, 3),
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
    args.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args.add_argument("--seconds", type=float, default=0.02, help="of a turn")
    a = args.parse_args()
    rows = []
    for model, tokens, skew in itertools.product(a.shape, a.tokens, a.skew):
        for row in rows_of(model, MODEL_SHAPES[model], a, tokens, skew):
            print(row, flush=True)
            rows.append(row)
        finish("mixture_layers", a, rows)


if __name__ == "__main__":
    main()
