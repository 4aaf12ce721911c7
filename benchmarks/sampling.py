"""Times what follows a forward on the device at hand: draws, log-probabilities with the N most
likely tokens, scores of prompts.

    python -m benchmarks.sampling --rows 64 256 --vocabulary 152064 --out results.json

One JSON object a line: microseconds of a call by the clock (many calls queued, one wait) and by the
profiler (the sum of its kernels), how many kernels it launches, bytes of temporaries, and seconds
to compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels import guarded, kernel_times
from jaxllm.nn.weight.parameters import contract
from jaxllm.sampling.logprobs import packed_logprobs
from pallas_kernels.draw import draw
from pallas_kernels.draw.cases import Options, logits, rows_of

CALLS = 50
WIDTHS = (0, 1, 5, 20, 64, 100)  # most likely tokens
SCORED = 20  # of them, for prompts


def measured(function: Callable[..., Array], *arguments: Any) -> dict[str, Any]:
    """One row of the table."""
    begin = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    compiled = time.perf_counter() - begin
    for _ in range(4):
        jax.block_until_ready(program(*arguments))
    begin = time.perf_counter()
    for _ in range(CALLS):
        out = program(*arguments)
    jax.block_until_ready(out)
    seconds = (time.perf_counter() - begin) / CALLS
    kernels = kernel_times(lambda first, *rest: program(first, *rest), arguments[0], arguments[1:])
    launches = {name: int(name.rsplit(" x", 1)[1]) for name in kernels}
    memory = program.memory_analysis()
    return {
        "us": round(seconds * 1e6, 1),
        "kernel_us": round(sum(kernels[name] * launches[name] for name in kernels), 1),
        "launches": sum(launches.values()),
        "temporary_bytes": memory.temp_size_in_bytes if memory is not None else None,
        "compile_s": round(compiled, 2),
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1] * launches[item[0]])[:6]),
    }


def score(hidden_BD: Array, asked: tuple[Array, Array]) -> Array:
    """The end of the engine's `score`: hidden states, the head's weights and the tokens that follow
    → packed log-probabilities."""
    weight_VD, token_B = asked
    return packed_logprobs(
        contract(hidden_BD, weight_VD, 1, jnp.float32), token_B, SCORED, normalised=True
    )


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument(
        "--width", type=int, default=3584, help="of the hidden states that become scores"
    )
    parser.add_argument("--out", default="", help="also write all rows to this JSON file")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for count in options.rows:
        host = logits("head", count, options.vocabulary)
        x, token = jax.device_put(host), jax.device_put(np.arange(count, dtype=np.int32))
        jobs: dict[str, tuple[Callable[..., Array], Any, Any]] = {
            f"logprobs {n}": (
                functools.partial(packed_logprobs, count=n, normalised=True),
                x,
                token,
            )
            for n in WIDTHS
        }
        hidden, weight = (
            jnp.ones((size, options.width), jnp.bfloat16) for size in (count, options.vocabulary)
        )
        jobs[f"score {SCORED}"] = (score, hidden, (weight, token))
        for backend in ("mosaic_gpu", "reference"):
            rows = rows_of([Options(temperature=0.8, top_p=0.9, top_k=50)] * count, host)
            jobs[f"draw {backend}"] = (
                functools.partial(draw, backend=backend),
                x,
                jax.device_put(rows),
            )
        for name, (function, *given) in jobs.items():
            row = {"op": name, "rows": count, "vocabulary": options.vocabulary} | guarded(
                lambda function=function, given=given: measured(function, *given)
            )
            found.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        with open(options.out, "w") as file:
            json.dump({**facts, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
