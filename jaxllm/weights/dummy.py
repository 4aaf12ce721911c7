"""Random weights made on the device: for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.nn.rules import Piece, Rule

COMPILING = 4  # threads


def dummy(rules: list[Rule], likes: list[jax.ShapeDtypeStruct], seed: int) -> Iterator[Array]:
    """Random parameters, in the order of `rules`, none constant.

    Each checkpoint tensor is drawn from (seed, its name), so values do not depend on the number of
    shards. Matrices have standard deviation 1/sqrt(inputs), which keeps activations near one; norms
    lie near one and biases near zero.
    """
    key = jax.random.key(seed)
    layouts: list[_Layout] = []
    for rule, like in zip(rules, likes, strict=True):
        layouts.append(
            (
                tuple(_Draw.for_piece(piece) for piece in rule.pieces),
                like.shape,
                like.dtype,
                like.sharding,
            )
        )
    with ThreadPoolExecutor(COMPILING, thread_name_prefix="dummy") as pool:
        # A model has a handful of layouts; compiling one takes longer than drawing all
        programs = {layout: pool.submit(_compile, layout, key) for layout in dict.fromkeys(layouts)}
        for rule, layout in zip(rules, layouts, strict=True):
            yield programs[layout].result()(key, _names(rule.pieces))


def _compile(given: _Layout, key: Array) -> jax.stages.Compiled:
    layout, shape, dtype, sharding = given
    names = jax.ShapeDtypeStruct((len(layout),), np.uint32)
    return (
        jax.jit(functools.partial(_draw, layout, shape, dtype), out_shardings=sharding)
        .lower(key, names)
        .compile()
    )


def _names(pieces: Sequence[Piece]) -> np.ndarray:
    """A number for each piece's name, folded into the seed."""
    return np.array([zlib.crc32(piece.name.encode()) for piece in pieces], np.uint32)


class _Draw(tuple[Piece, float, float]):
    """A piece without its name, and the mean and deviation of its values."""

    @staticmethod
    def for_piece(piece: Piece) -> _Draw:
        nameless = replace(piece, name="")
        if len(piece.source) > 1:
            return _Draw((nameless, 0.0, piece.source[-1] ** -0.5))
        return _Draw(
            (nameless, 0.0, 0.02) if piece.name.endswith(".bias") else (nameless, 1.0, 0.02)
        )


type _Layout = tuple[tuple[_Draw, ...], tuple[int, ...], jnp.dtype, jax.sharding.Sharding]


def _draw(
    layout: tuple[_Draw, ...], shape: tuple[int, ...], dtype: jnp.dtype, key: Array, names: Array
) -> Array:
    parts = []
    for index, (piece, mean, deviation) in enumerate(layout):
        values = (
            jax.random.normal(jax.random.fold_in(key, names[index]), piece.source, jnp.float32)
            * deviation
            + mean
        )
        parts.append(jnp.repeat(piece.arranged(values.astype(dtype)), piece.repeat, axis=0))
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)).reshape(shape)
