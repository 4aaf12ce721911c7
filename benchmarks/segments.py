"""Times attention within segments on the GPU at hand, a step of 8,192 tokens at a time.

    python -m benchmarks.segments --lengths 64 128 512 2048 8192 --heads 12 16 --window 64

Inputs are equally long, or with `--ragged` from 1 to that length. `tflops` counts the pairs of
tokens that see each other. `error` is that of the first tokens against the reference in float32, as
a relative Frobenius norm.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernels import seconds_a_call
from benchmarks.record import finish, parser
from pallas_kernels.segment_attention import Segments, mosaic_gpu, reference

TOKENS, CALLS, CHECKED = 8192, 12, 2048


def segments_of(length: int, ragged: bool, seed: int) -> Segments:
    """Segments that fill a step, the last one cut off."""
    rng, ends = np.random.default_rng(seed), [0]
    while ends[-1] < TOKENS:
        ends.append(ends[-1] + (int(rng.integers(1, length + 1)) if ragged else length))
    bounds = np.minimum(np.array(ends), TOKENS)
    spread = [np.repeat(x, np.diff(bounds)) for x in (bounds[:-1], bounds[1:])]
    first, end = (jnp.asarray(x, jnp.int32) for x in spread)
    return Segments(first, end, int(np.diff(bounds).max()))


def pairs_of(segments: Segments, window: int | None) -> int:
    """Pairs of tokens that see each other."""
    first, end = (np.asarray(x, np.int64) for x in (segments.first_T, segments.end_T))
    if window is not None:
        place = np.arange(TOKENS)
        first, end = np.maximum(first, place - window), np.minimum(end, place + window + 1)
    return int((end - first).sum())


def row(segments: Segments, heads: int, head_dim: int, window: int | None) -> dict[str, Any]:
    """Figures of one step."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (TOKENS, heads, head_dim), jnp.bfloat16) for key in keys)
    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window}

    @jax.jit
    def chain(q: Array, k: Array, v: Array, segments: Segments) -> Array:
        plan = mosaic_gpu.plan(segments, window=window)
        for _ in range(CALLS):
            q = mosaic_gpu.segment_attention(q, k, v, segments, plan=plan, **options)
        return q

    found = mosaic_gpu.segment_attention(q, k, v, segments, **options)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    wanted = jax.jit(lambda *args: reference.segment_attention(*args, **options))(*exact, segments)
    difference = (found.astype(jnp.float32) - wanted)[:CHECKED]
    seconds = seconds_a_call(chain, q, (k, v, segments), CALLS)
    work = 4 * pairs_of(segments, window) * heads * head_dim
    return {
        "us": round(seconds * 1e6, 2),
        "tflops": round(work / seconds / 1e12, 1),
        "error": float(jnp.linalg.norm(difference) / jnp.linalg.norm(wanted[:CHECKED])),
    }


def main() -> None:
    """Print a row for each length and number of heads."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--lengths", type=int, nargs="+", default=(128, 512, 2048))
    args.add_argument("--heads", type=int, nargs="+", default=(12, 16))
    args.add_argument("--head-dim", type=int, default=64)
    args.add_argument("--window", type=int, help="tokens seen on either side; by default all")
    args.add_argument("--ragged", action="store_true", help="inputs from 1 to the length")
    a = args.parse_args()
    rows = []
    for length in a.lengths:
        for heads in a.heads:
            found = row(segments_of(length, a.ragged, a.seed), heads, a.head_dim, a.window)
            rows.append({"length": length, "heads": heads} | found)
            print(rows[-1], flush=True)
    finish("segments", a, {"rows": rows})


if __name__ == "__main__":
    main()
