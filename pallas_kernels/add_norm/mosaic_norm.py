"""What the kernels for NVIDIA Hopper that end in a norm share: what they add to a row, and how a
warpgroup norms, rounds and stores a row that it has in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic_gpu import store
from pallas_kernels.parts import NormedRows, Parts, Product, WeightedRows, added, whole
from pallas_kernels.scaled_matmul import Inputs, RoundedRows, Rounding, mosaic_rounding

type Load = Callable[[Any], Array]


class Delta(NamedTuple):
    """What is added to x: arrays, and what a kernel makes of row t of refs to them; `load` loads a
    row. All that it makes is added to x in float32, in that order."""

    arrays: tuple[Array, ...]
    terms: Callable[..., list[Array]]

    @classmethod
    def of(cls, delta_TD: Product) -> Delta:
        if isinstance(delta_TD, Parts) and delta_TD.done is None:
            row = functools.partial(added, delta_TD.dtype)
            return cls((delta_TD.sums, *delta_TD.scales), lambda *operands: [row(*operands)])
        if isinstance(delta_TD, WeightedRows):
            return cls(delta_TD[:3], _weighted)
        if isinstance(delta_TD, NormedRows):
            arrays = delta_TD.y_TD, delta_TD.weight_D
            return cls(arrays, functools.partial(_normed, delta_TD.eps))
        return cls((whole(delta_TD),), _row)


def _row(t: Array, load: Load, delta_ref: Any) -> list[Array]:
    return [load(delta_ref.at[t])]


def _normed(eps: float, t: Array, load: Load, y_ref: Any, weight_ref: Any) -> list[Array]:
    row = load(y_ref.at[t])
    weight = load(weight_ref)
    return [_norm(row, weight.astype(jnp.float32), eps)]


def _weighted(t: Array, load: Load, y_ref: Any, place_ref: Any, weight_ref: Any) -> list[Array]:
    """Of `WeightedRows`: all rows are loaded before the first is used."""
    choices = range(place_ref.shape[1])
    weights = [weight_ref[t, k] for k in choices]
    rows = [load(y_ref.at[place_ref[t, k]]) for k in choices]
    return [row.astype(jnp.float32) * weight for row, weight in zip(rows, weights, strict=True)]


def norm_results(x_TD: Array, rounding: Rounding | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `store_norm` fills. Raises ValueError for numbers that it cannot round to."""
    T, D = x_TD.shape
    if rounding is None:
        return (jax.ShapeDtypeStruct((T, D), x_TD.dtype),)
    if jnp.dtype(rounding.dtype) != mosaic_rounding.NUMBERS:
        raise ValueError(f"mosaic_gpu add_norm rounds to float8_e4m3fn, not {rounding.dtype}")
    return mosaic_rounding.results(D, rounding.rows)


def norm_of(x_TD: Array, results: list[Array]) -> Inputs:
    """The norm that `store_norm` left in `results`."""
    if len(results) == 1:
        return results[0]
    numbers, scale = results
    return RoundedRows(numbers, scale, x_TD.shape[0], x_TD.dtype)


def store_norm(total: Array, weight: Array, eps: float, t: Array, refs: Sequence[Any]) -> None:
    """Norm row t, which the warpgroup holds in registers, and round it if `refs` say so."""
    norm = _norm(total, weight, eps)
    if len(refs) == 1:
        store(refs[0].at[t], norm)
    else:
        mosaic_rounding.store_rounded(norm, [t], *refs)


def _norm(row: Array, weight: Array, eps: float) -> Array:
    """The norm of a row in registers."""
    wide = row.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) * (1 / len(row)) + eps)
    return (wide * scale * weight).astype(row.dtype)
