"""4-bit weights as the kernels read them, and how they come of plain numbers.

A chunk is 64 rows x 64 columns. The tensor cores take 16 columns of it at a time from registers:
lane (warp, g, c) holds rows 16·warp + g and + 8 of columns 2c, 2c + 1 and, 8 further, the same. A
word is the 8 numbers of a lane; its 4 words of a chunk are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# rows and columns of a chunk
ROWS = 64
CHUNK = 64
SLOT = 128  # columns that kernels read at once; words cover a multiple of it
WORDS = (2, 256)  # a chunk's words, as the copy engine takes them
FORMS = ("symmetric", "zeros", "offsets")
MIDDLE = 8  # the zero point of weights that have none of their own
FP4 = "fp4"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What numbers of 0 to 15 stand for where they are no integers: floats of 2 exponent bits and 1 of
# mantissa (OCP Microscaling Formats 1.0), the quantiles of QLoRA, appendix E, and the steps of
# llama.cpp's IQ4
TABLES = {
    FP4: (*_FP4, *(-value for value in _FP4)),
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("words", "scales", "zeros", "offsets"),
    meta_fields=("rows", "group", "table"),
)
@dataclass(frozen=True)
class Int4:
    """A weight `[O, I]` in groups of columns: (number - zero point) · scale, number · scale +
    offset, or what the number stands for · scale. Rows and columns fill whole chunks.

    Attributes:
      words: int32 `[R, C, 2, 256]`, 8 numbers of 0 to 15 each, for R x C chunks.
      scales: `[R, G, 64]`, of the 64 rows of R blocks in G groups; floats.
      zeros: zero points in the scales' type and shape; None = 8.
      offsets: what is added, in the scales' type and shape; None = nothing. With it, the zero point
        is 0.
      rows: O.
      group: columns that share a scale.
      table: one of `TABLES`; None where numbers are integers.
    """

    words: Array
    scales: Array
    zeros: Array | None
    offsets: Array | None
    rows: int
    group: int
    table: str | None = None

    @property
    def form(self) -> str:
        """One of `FORMS` or of `TABLES`."""
        if self.table is not None:
            return self.table
        if self.zeros is not None:
            return "zeros"
        return FORMS[2 * (self.offsets is not None)]

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def words_of(numbers_OI: Any) -> Array:
    """Numbers of 0 to 15 as int32 words `[R, C, 2, 256]`; the middle fills rows and columns up."""
    rows, columns = numbers_OI.shape
    padding = ((0, -rows % ROWS), (0, -columns % SLOT))
    full = jnp.pad(jnp.asarray(numbers_OI), padding, constant_values=MIDDLE).astype(jnp.uint32)
    R = full.shape[0] // ROWS
    C = full.shape[1] // CHUNK
    # block, warp, half, g; chunk, word, further, c, odd
    places = full.reshape(R, 4, 2, 8, C, 4, 2, 4, 2).transpose(0, 4, 1, 3, 7, 5, 8, 6, 2)
    nibbles = places.reshape(R, C, *WORDS, 8) << jnp.arange(0, 32, 4, dtype=jnp.uint32)
    return lax.bitcast_convert_type(nibbles.sum(axis=-1, dtype=jnp.uint32), jnp.int32)


def values_of(values_OG: Any, columns: int, group: int) -> Array:
    """Scales, zero points or offsets of each group as `[R, G, 64]`; zeros fill rows and groups up.
    Rows g and g + 8 of a warp are neighbours."""
    rows, groups = values_OG.shape
    wanted = max(groups, -(-(columns + -columns % SLOT) // group))
    full = jnp.pad(jnp.asarray(values_OG), ((0, -rows % ROWS), (0, wanted - groups)))
    R = full.shape[0] // ROWS
    return full.reshape(R, 4, 2, 8, wanted).transpose(0, 4, 1, 3, 2).reshape(R, wanted, ROWS)


def numbers_in(words: Array) -> Array:
    """The numbers `[64·R, 64·C]`, int32, of words."""
    R, C = words.shape[:2]
    nibbles = (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.int32)) & 15
    places = nibbles.reshape(R, C, 4, 8, 4, 4, 2, 2, 2).transpose(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return places.reshape(R * ROWS, C * CHUNK)


def values_in(values: Array) -> Array:
    """`[64·R, G]` of `[R, G, 64]`."""
    R, G = values.shape[:2]
    return values.reshape(R, G, 4, 8, 2).transpose(0, 2, 4, 3, 1).reshape(R * ROWS, G)


def dequantised(w: Int4, columns: int, dtype: Any) -> Array:
    """The weight `[O, columns]`, computed in float32 and rounded once to `dtype`; what numbers of a
    table stand for is rounded to `dtype` before."""
    numbers = numbers_in(w.words)[: w.rows, :columns]
    if w.table is None:
        numbers = numbers.astype(jnp.float32)
    else:
        # By comparisons, which are one launch with what follows
        values = np.array(TABLES[w.table]).astype(dtype).astype(np.float32)
        terms = (jnp.where(numbers == i, v, 0.0) for i, v in enumerate(values))
        numbers = sum(terms, jnp.float32(0))

    def spread(values: Array) -> Array:
        group_values = values_in(values).astype(jnp.float32)[: w.rows]
        return jnp.repeat(group_values, w.group, axis=1)[:, :columns]

    scales = spread(w.scales)
    if w.offsets is not None:
        return (numbers * scales + spread(w.offsets)).astype(dtype)
    if w.table is not None:
        return (numbers * scales).astype(dtype)
    return ((numbers - (MIDDLE if w.zeros is None else spread(w.zeros))) * scales).astype(dtype)
