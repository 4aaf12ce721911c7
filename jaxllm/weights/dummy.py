"""Random weights made on the device: for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.models import Piece, Rule


def dummy(rules: list[Rule], likes: list[jax.ShapeDtypeStruct], seed: int) -> Iterator[Array]:
    """Every parameter in turn, random and never constant.

    Each checkpoint tensor is drawn from (seed, its name), so the values do not depend on the number of shards. Matrices have
    standard deviation 1/sqrt(inputs), which keeps activations near one; norms lie near one and biases near zero.
    """
    programs: dict[object, Callable[[Array, np.ndarray], Array]] = {}
    key = jax.random.key(seed)
    for rule, like in zip(rules, likes, strict=True):
        layout = tuple(_Draw.of(piece) for piece in rule.pieces)
        kind = (layout, like.shape, like.dtype, like.sharding)
        if kind not in programs:
            programs[kind] = jax.jit(functools.partial(_draw, layout, like.shape, like.dtype), out_shardings=like.sharding)
        yield programs[kind](key, np.array([zlib.crc32(piece.name.encode()) for piece in rule.pieces], np.uint32))


class _Draw(tuple[Piece, float, float]):
    """A piece without its name, and the mean and deviation of its values: what distinguishes compiled programs."""

    @staticmethod
    def of(piece: Piece) -> _Draw:
        nameless = Piece("", piece.source, piece.view, piece.start, piece.repeat)
        if len(piece.source) > 1:
            return _Draw((nameless, 0.0, piece.source[-1] ** -0.5))
        return _Draw((nameless, 0.0, 0.02) if piece.name.endswith(".bias") else (nameless, 1.0, 0.02))


def _draw(layout: tuple[_Draw, ...], shape: tuple[int, ...], dtype: jnp.dtype, key: Array, names: Array) -> Array:
    parts = []
    for index, (piece, mean, deviation) in enumerate(layout):
        values = jax.random.normal(jax.random.fold_in(key, names[index]), piece.source, jnp.float32) * deviation + mean
        parts.append(jnp.repeat(values.astype(dtype).reshape(piece.view), piece.repeat, axis=0))
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)).reshape(shape)
