"""Rows of sampling options for tests, and the options' meaning in numpy float64 with a sort."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxllm.sampling.choose import Sampler
from jaxllm.sampling.options import DRAW_COLUMNS
from jaxllm.sampling.sample import DrawRows, draw_rows, sample

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "position": 0,
    "suppress": False,
}


def make_rows(count: int, stop_ids: tuple[int, ...] = (-1,), **options) -> DrawRows:
    """`count` rows that ask for nothing but what `options` say; scalars are repeated."""
    assert options.keys() <= NEUTRAL.keys()
    full = {
        name: np.broadcast_to(np.asarray(options.get(name, value)), (count,))
        for name, value in NEUTRAL.items()
    }
    columns = {name: full[name].astype(column.dtype) for name, column in DRAW_COLUMNS.items()} | {
        "key": np.array([int(s) % 2**64 for s in full["seed"]], np.uint64)
        .view(np.uint32)
        .reshape(count, 2),
        "stop_ids": np.broadcast_to(np.array(stop_ids, np.int32), (count, len(stop_ids))),
    }
    return _draw_rows(columns, full["position"].astype(np.int32), full["suppress"].astype(bool))


# As users compile it; other tests are compiled with little optimisation
OPTIMISED = {"xla_backend_optimization_level": 3}


_draw_rows = jax.jit(draw_rows)


@functools.partial(jax.jit, static_argnums=2, compiler_options=OPTIMISED)
def run(logits, rows: DrawRows, sampler: Sampler) -> jax.Array:
    """`sample`, compiled."""
    return sample(logits, rows, sampler)


def softmax(x: np.ndarray) -> np.ndarray:
    """In float64."""
    x = np.asarray(x, np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def kept(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Which tokens of one row may be drawn: min_p, then top_k, then top_p, as a mask."""
    scaled = np.asarray(logits, np.float64) / temperature
    probs = softmax(scaled)
    keep = probs >= min_p * probs.max()
    if top_k > 0:
        left = np.sort(scaled[keep])[::-1]
        keep &= scaled >= left[min(top_k, len(left)) - 1]
    if top_p < 1:
        probs = softmax(np.where(keep, scaled, -np.inf))
        more_likely = np.array([probs[probs > p].sum() for p in probs])
        keep &= more_likely < top_p
    return keep


def processed(logits: np.ndarray, temperature: float = 1.0, **filters) -> np.ndarray:
    """The exact distribution of a draw."""
    return softmax(
        np.where(
            kept(logits, temperature, **filters),
            np.asarray(logits, np.float64) / temperature,
            -np.inf,
        )
    )
