"""Blocks of parameters, made of the checkpoint tensors that their rules name."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.nn.rules import Ordered, Piece, Rule
from jaxllm.tensors import Deferred
from jaxllm.weights import mapped
from jaxllm.weights.stored import Tensor

COPY_BYTES = 2**24

type Index = tuple[slice, ...]
type View = Callable[[str], Tensor]  # of a checkpoint tensor, by name


def place(rule: Rule, like: jax.ShapeDtypeStruct, view: View) -> jax.Array:
    """The parameter of `rule` on the devices of `like.sharding`, in `like.dtype`.

    The host holds copies of this parameter alone.
    """

    def block(index: Index) -> np.ndarray:
        return read_block(rule, like, index, view)

    return jax.make_array_from_callback(like.shape, like.sharding, block, dtype=like.dtype)


def read_block(
    rule: Rule,
    like: jax.ShapeDtypeStruct,
    index: Index,
    view: View,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """parameter[index], cast while it is copied into `out`, by default into new memory. Slices have
    step 1, and rows behind all pieces are zero. Raises ConfigError where a file has become shorter,
    and where float16 overflows."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)]
    if out is None:
        out = np.empty([stop - start for start, stop in bounds], like.dtype)
    whole, *others = rule.pieces
    cuts = tuple(slice(*bound) for bound in bounds)
    if not others and (whole.view[1:], whole.repeat, whole.row) == (like.shape[1:], 1, 0):
        stored = _arranged(whole, view)[cuts]
        _copy(out[: stored.shape[0]], stored, rule.parameter)
        out[stored.shape[0] :] = 0
        return out
    (begin, end), (left, right) = bounds[:2]
    for piece in rule.pieces:
        rows = range(max(begin, piece.row), min(end, piece.row + piece.rows))
        first = max(left, piece.start)
        last = min(right, piece.start + piece.view[1])
        if not rows or first >= last:
            continue
        source = _arranged(piece, view)
        columns = (slice(first - piece.start, last - piece.start), *cuts[2:])
        for row in rows:
            stored = source[(row - piece.row) // piece.repeat][columns]
            _copy(out[row - begin, first - left : last - left], stored, rule.parameter)
    filled = max(piece.row + piece.rows for piece in rule.pieces)
    out[max(0, filled - begin) :] = 0
    return out


def _arranged(piece: Piece, view: View) -> Tensor:
    """The stored tensor as the piece sees it. What another order makes is made of the entries that
    are read, not of all of them for every block."""
    tensor = view(piece.name)
    if isinstance(tensor, np.ndarray) and any(isinstance(step, Ordered) for step in piece.steps):
        stored = tensor
        tensor = Deferred(
            stored.shape, lambda bounds: stored[tuple(slice(*bound) for bound in bounds)]
        )
    return piece.arranged(tensor)


def _copy(target: np.ndarray, source: Tensor, parameter: str) -> None:
    """Copy with a cast, some rows at a time, since those of a packed tensor are unpacked here."""
    try:
        if isinstance(source, Deferred) or source.dtype != target.dtype:
            rows = max(1, COPY_BYTES * len(target) // max(1, target.nbytes))
            with np.errstate(over="ignore"):
                for start in range(0, len(target), rows):
                    target[start : start + rows] = _read(source[start : start + rows])
        elif not mapped.read(source, target):
            target[...] = source
    except OSError as error:
        raise ConfigError(f"the checkpoint cannot be read: {error.strerror or error}") from None
    if target.dtype == np.float16 and not np.isfinite(target).all():
        raise ConfigError(
            f"{parameter} has values beyond the range of float16 (65504); "
            "use dtype bfloat16 or float32"
        )


def _read(source: Tensor) -> Tensor:
    """Rows of a mapped file that will be cast, read instead of mapped where they lie in one
    piece."""
    if isinstance(source, Deferred):
        return source
    rows = np.empty(source.shape, source.dtype)
    if mapped.read(source, rows):
        return rows
    return source
