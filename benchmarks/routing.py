"""Times what stands around the products of a mixture's experts on the GPU at hand: the router's
product, routing, the gather of rows and the sum of each token's experts, layer after layer.

    python -m benchmarks.routing --shape Qwen3-30B-A3B --tokens 1 4 16 64 256 2048

Every back end of `pallas_kernels.route` that takes the shape is timed. `launches` are those of a
layer in the compiled program. `differ` counts choices that are not the reference's, of `tokens`
times K, and `error` is the largest difference of a weight where all choices of a token agree.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.record import finish, parser
from benchmarks.steps import TURNS, timed
from pallas_kernels import route as routes
from pallas_kernels.grouped_matmul import Groups, combine
from pallas_kernels.grouped_matmul.cases import MODEL_SHAPES, ModelShape
from pallas_kernels.route import BACKENDS, Rule, route

LAYERS = 8  # one after the other
NO_LAUNCH = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}


def routed(x: Array, weight_ED: Array, rule: Rule, backend: str) -> tuple[Groups, Array]:
    """The groups of tokens, and the weights of their choices."""
    logits = lax.dot_general(
        x, weight_ED, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return route(logits, None, rule, backend=backend)


def layer(x: Array, weight_ED: Array, y_PD: Array, rule: Rule, backend: str) -> Array:
    """All of a layer but the products of experts, for which `y_PD` stands where no rows are
    gathered."""
    groups, weight = routed(x, weight_ED, rule, backend)
    # The barrier keeps the gather apart from the sum, as the products do
    rows = y_PD if groups.token_P is None else lax.optimization_barrier(groups.rows_of(x))
    return x + combine(rows, groups, weight)


def launches(hlo: str) -> int:
    """Kernels that a compiled program starts."""
    ops = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", entry_of(hlo), re.MULTILINE)
    return sum(op not in NO_LAUNCH for op in ops)


def entry_of(hlo: str) -> str:
    """The computation that a program begins with."""
    entry = hlo[hlo.index("\nENTRY") :]
    return entry[entry.index("\n", 1) :]


def rows_of(
    model: str, shape: ModelShape, tokens: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Microseconds a layer of every back end, at every number of tokens."""
    rule = Rule(shape.choices)
    weights = [
        jax.random.normal(jax.random.key(i), (shape.experts, shape.width), jnp.bfloat16)
        for i in range(LAYERS)
    ]
    for T in tokens:
        x = jax.random.normal(jax.random.key(T), (T, shape.width), jnp.bfloat16)
        y = jnp.ones((16 * min(shape.experts, T * shape.choices), shape.width), x.dtype)
        logits = jax.ShapeDtypeStruct((T, shape.experts), jnp.float32)
        for backend in BACKENDS:
            if not routes.BACKENDS.supports(backend, logits, rule):
                continue

            def chained(x: Array, weights: list[Array], y: Array, backend: str = backend) -> Array:
                for weight in weights:
                    x = layer(x, weight, y, rule, backend)
                return x

            run = jax.jit(chained).lower(x, weights, y).compile()
            once = lambda run=run, x=x, y=y: run(x, weights, y)
            us = 1e6 * statistics.median(timed(once, seconds) for _ in range(TURNS)) / LAYERS
            row = {"model": model, "tokens": T, "backend": backend, "us": round(us, 2)}
            row["launches"] = launches(run.as_text()) / LAYERS
            yield row | compared(x, weights[0], rule, backend)


def compared(x: Array, weight_ED: Array, rule: Rule, backend: str) -> dict[str, float]:
    """How the back end's choices and weights differ from the reference's."""
    run = jax.jit(routed, static_argnums=(2, 3))
    (got, weight), (wanted, wanted_weight) = (
        run(x, weight_ED, rule, own) for own in (backend, "reference")
    )
    same = np.asarray(got.place_TK == wanted.place_TK)
    whole = same.all(axis=1)
    difference = np.abs(np.asarray(weight - wanted_weight))[whole]
    used = int(wanted.used[-1])
    tiles = np.asarray(got.expert_W[:used] != wanted.expert_W[:used]).sum()
    return {
        "differ": int((~same).sum() + tiles),
        "error": float(difference.max(initial=0)),
    }


def main() -> None:
    """Time the models that were named."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--shape", nargs="+", choices=MODEL_SHAPES, default=list(MODEL_SHAPES))
    args.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 2048])
    args.add_argument("--seconds", type=float, default=0.05, help="of a turn")
    a = args.parse_args()
    rows = []
    for model in a.shape:
        for row in rows_of(model, MODEL_SHAPES[model], a.tokens, a.seconds):
            print(row, flush=True)
            rows.append(row)
            finish("routing", a, rows)


if __name__ == "__main__":
    main()
