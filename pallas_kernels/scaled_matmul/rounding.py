"""Numbers of 8 bits with scales.

A scale is the largest magnitude that it covers, over the type's largest number: 448 for
float8_e4m3fn, 127 for int8. Numbers are divided by it and rounded, ties to even. Both quotients are
products with the float32 nearest to 1/448 or 1/127 and to 1/scale, as compilers make them.

Integers of a token that are "shifted" begin at its smallest number, or 0: its scale is 1/255 of its
range, and its zero point, from -128 to 127, what 0 becomes. A product takes them less that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

# How a product rounds its inputs: not at all; with a scale for each token; for each token and group
# of columns; with a scale that was given for all tokens; with one and a zero point for each token
INPUTS = ("plain", "token", "group", "given", "shifted")
IN_16_BITS = ("plain", "shifted")  # of these, which products take in 16 bits
# of shifted integers
LEAST = -128
MOST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedRows:
    """Rows `[T, I]` of tokens as a product multiplies them: numbers times scales.

    Attributes:
        numbers: `[R, I]`; the first T rows are those of tokens, the others are anything.
        scale: `[R]`, float32.
        tokens: T.
        dtype: of the rows before, and so of products with them.
    """

    numbers: Array
    scale: Array
    tokens: int = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.numbers.shape[1]

    @property
    def ndim(self) -> int:
        return 2

    def sized(self, rows: int) -> RoundedRows:
        """With R = `rows`."""
        held = len(self.scale)
        if rows == held:
            return self
        numbers, scale = (
            part[:rows] if rows < held else jnp.pad(part, [(0, rows - held), *[(0, 0)] * more])
            for part, more in ((self.numbers, 1), (self.scale, 0))
        )
        return RoundedRows(numbers, scale, self.tokens, self.dtype)


type Inputs = Array | RoundedRows


class Rounding(NamedTuple):
    """What a product takes in place of plain rows, from whoever can make it in passing.

    Attributes:
        dtype: of numbers, with a scale for each token.
        rows: R of the `RoundedRows`.
    """

    dtype: Any
    rows: int

    def of(self, x_TI: Array) -> RoundedRows:
        """Plain rows, rounded."""
        numbers, scale = rounded(x_TI, self.dtype, x_TI.shape[1])
        made = RoundedRows(numbers, scale[:, 0], x_TI.shape[0], x_TI.dtype)
        return made.sized(self.rows)


def largest(dtype: DTypeLike) -> float:
    """The largest number of the type whose negative it has, too."""
    if jnp.issubdtype(dtype, jnp.integer):
        exact = jnp.iinfo
    else:
        exact = jnp.finfo
    return float(exact(dtype).max)


def rounded(x: Array, dtype: DTypeLike, group: int) -> tuple[Array, Array]:
    """`[..., I]` as numbers of the type, and float32 scales `[..., G]` of each `group` columns.

    The last group may be cut off. Zeros alone have the scale 1.
    """
    exact = x.astype(jnp.float32)
    columns = x.shape[-1]
    missing = -columns % group
    if missing:
        wide = jnp.pad(exact, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    else:
        wide = exact
    most = jnp.max(jnp.abs(wide).reshape(*x.shape[:-1], -1, group), axis=-1)
    scale = jnp.where(most == 0, 1.0, most * (1 / largest(dtype)))
    return rounded_by(exact, scale, dtype, group), scale


def rounded_inputs(
    x_TI: Inputs, dtype: DTypeLike, group: int, inputs: str, input_scale: Array | None = None
) -> tuple[Array, Array]:
    """x as a product takes it, numbers `[T, I]`, and their scales: `[T, G]`, `[T, 1]` or `[1, 1]`.

    `inputs` is one of INPUTS; "given" needs `input_scale`, a float32 scalar. Numbers of those that
    are "plain" or "shifted" are of x's type.
    """
    if isinstance(x_TI, RoundedRows):
        rows = x_TI.sized(x_TI.tokens)
        return rows.numbers, rows.scale[:, None]
    if inputs == "plain":
        return x_TI, jnp.ones((1, 1), jnp.float32)
    if inputs == "given":
        assert input_scale is not None
        return rounded_by(x_TI, input_scale.reshape(1, 1), dtype), input_scale.reshape(1, 1)
    if inputs == "shifted":
        return shifted(x_TI)
    return rounded(x_TI, dtype, group if inputs == "group" else x_TI.shape[1])


def shifted(x_TI: Array) -> tuple[Array, Array]:
    """Integers less their token's zero point, -255 to 255, which x's type has, and float32 scales
    `[T, 1]`. Zeros alone have the scale 1."""
    exact = x_TI.astype(jnp.float32)
    low, high = (
        extreme(exact, axis=1, keepdims=True, initial=0.0) for extreme in (jnp.min, jnp.max)
    )
    scale = jnp.where(high == low, 1.0, (high - low) * (1 / (MOST - LEAST)))
    zero = jnp.clip(jnp.round(LEAST - low * (1 / scale)), LEAST, MOST)
    number = jnp.clip(jnp.round(exact * (1 / scale) + zero), LEAST, MOST)
    return (number - zero).astype(x_TI.dtype), scale


def in_steps(x_TI: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The numbers of `rounded`, one scale a token, for products of other types: of x's type and at
    most 1, by a power of two, so that float16 has their sums; and the scales `[T, 1]` of these."""
    numbers, scale = rounded(x_TI, dtype, x_TI.shape[1])
    most = 2.0 ** math.ceil(math.log2(largest(dtype)))
    return numbers.astype(x_TI.dtype) * jnp.asarray(1 / most, x_TI.dtype), scale * most


def rounded_by(x: Array, scale: Array, dtype: DTypeLike, group: int = 1) -> Array:
    """x times 1/scale as numbers of the type; what is out of range becomes the nearest in it."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    if integer:
        low = jnp.iinfo(dtype).min
    else:
        low = -largest(dtype)
    high = largest(dtype)
    y = jnp.clip(x.astype(jnp.float32) * spread(1 / scale, group, x.shape[-1]), low, high)
    return (jnp.round(y) if integer else y).astype(dtype)


def spread(scale: Array, group: int, columns: int) -> Array:
    """Scales `[..., G]` as those of each column, `[..., columns]` or `[..., 1]`."""
    if scale.shape[-1] == 1:
        return scale
    return jnp.repeat(scale, group, axis=-1)[..., :columns]
