"""Random weights made on the device: for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.nn.rules import Piece, Rule

COMPILING = 4  # threads


# A piece without its name, and the mean and deviation of its values
type _Draw = tuple[Piece, float, float]
type _Layout = tuple[tuple[_Draw, ...], tuple[int, ...], jnp.dtype, jax.sharding.Sharding]


def dummy(rules: list[Rule], likes: list[jax.ShapeDtypeStruct], seed: int) -> Iterator[Array]:
    """Random parameters, in the order of `rules`, none constant.

    Each checkpoint tensor is drawn from (seed, its name), so values do not depend on the number of
    shards. Matrices have standard deviation 1/sqrt(inputs), which keeps activations near one; norms
    lie near one and biases near zero.
    """
    key = jax.random.key(seed)
    layouts: list[_Layout] = [
        (tuple(map(_drawn, rule.pieces)), like.shape, like.dtype, like.sharding)
        for rule, like in zip(rules, likes, strict=True)
    ]
    with ThreadPoolExecutor(COMPILING, thread_name_prefix="dummy") as pool:
        # A model has a handful of layouts; compiling one takes longer than drawing all
        programs = {layout: pool.submit(_compile, layout, key) for layout in dict.fromkeys(layouts)}
        for rule, layout in zip(rules, layouts, strict=True):
            # A number for each piece's name, folded into the seed
            names = [zlib.crc32(piece.name.encode()) for piece in rule.pieces]
            yield programs[layout].result()(key, np.array(names, np.uint32))


def _drawn(piece: Piece) -> _Draw:
    nameless = replace(piece, name="")
    if len(piece.source) > 1:
        return nameless, 0.0, piece.inputs**-0.5
    return nameless, 0.0 if piece.name.endswith(".bias") else 1.0 - piece.added, 0.02


def _compile(parameter: _Layout, key: Array) -> jax.stages.Compiled:
    layout, shape, dtype, sharding = parameter
    names = jax.ShapeDtypeStruct((len(layout),), np.uint32)
    draw = functools.partial(_draw, layout, shape, dtype)
    return jax.jit(draw, out_shardings=sharding).lower(key, names).compile()


def _draw(
    layout: tuple[_Draw, ...], shape: tuple[int, ...], dtype: jnp.dtype, key: Array, names: Array
) -> Array:
    def draw_piece(drawing: _Draw, name: Array) -> Array:
        piece, mean, deviation = drawing
        values = jax.random.normal(jax.random.fold_in(key, name), piece.source, jnp.float32)
        arranged = piece.arranged((values * deviation + mean).astype(dtype))
        return jnp.repeat(arranged, piece.repeat, axis=0)

    columns: dict[int, list[int]] = {}  # pieces side by side; those of a column lie row by row
    for index, (piece, _, _) in enumerate(layout):
        columns.setdefault(piece.start, []).append(index)
    parts = []
    for first, *others in columns.values():
        draw = functools.partial(draw_piece, layout[first])
        if others:  # alike but for their rows
            drawn = jax.lax.map(draw, names[np.array([first, *others])])
            parts.append(drawn.reshape(-1, *drawn.shape[2:]))
        else:
            parts.append(draw(names[first]))
    drawn = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    return jnp.pad(drawn.reshape(-1), (0, math.prod(shape) - drawn.size)).reshape(shape)
