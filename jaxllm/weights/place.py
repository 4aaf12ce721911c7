"""Fills parameters from checkpoint tensors, shard by shard.

Only the slices that a device holds are read.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.nn.rules import Piece, Rule

type Index = tuple[slice, ...]


def place(rule: Rule, like: jax.ShapeDtypeStruct, view: Callable[[str], np.ndarray]) -> jax.Array:
    """The parameter of `rule` on the devices of `like.sharding`, in `like.dtype`.

    The host holds copies of this parameter alone.
    """

    def block(index: Index) -> np.ndarray:
        return read_block(rule, like, index, view)

    return jax.make_array_from_callback(like.shape, like.sharding, block, dtype=like.dtype)


def read_block(
    rule: Rule, like: jax.ShapeDtypeStruct, index: Index, view: Callable[[str], np.ndarray]
) -> np.ndarray:
    """parameter[index], cast while it is copied.

    Slices have step 1; parameters of several pieces are cut along their first axis alone.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)]
    out = np.empty([stop - start for start, stop in bounds], like.dtype)
    for piece in rule.pieces:
        source = piece.arranged(view(piece.name))
        if len(rule.pieces) == 1:
            _copy(out, source[tuple(slice(*bound) for bound in bounds)], rule.parameter)
            continue
        target = out[:, piece.start : piece.start + piece.view[1]]
        for row in range(*bounds[0]):
            _copy(target[row - bounds[0][0]], source[row // piece.repeat], rule.parameter)
    return out


def _copy(target: np.ndarray, source: np.ndarray, parameter: str) -> None:
    """Copy with a cast. Raises ConfigError where float16 overflows."""
    with np.errstate(over="ignore"):
        target[...] = source
    if target.dtype == np.float16 and not np.isfinite(target).all():
        raise ConfigError(
            f"{parameter} has values beyond the range of float16 (65504); "
            "use dtype bfloat16 or float32"
        )


def mismatch(
    piece: Piece, dtype: str, shape: tuple[int, ...], known: tuple[str, ...]
) -> str | None:
    """Why a checkpoint tensor cannot be this piece, or None. `known` are the readable dtypes."""
    if shape != piece.source:
        return f"{piece.name} has shape {list(shape)}, expected {list(piece.source)}"
    if dtype not in known:
        return f"{piece.name} has dtype {dtype}, which is not one of {', '.join(known)}"
    return None
