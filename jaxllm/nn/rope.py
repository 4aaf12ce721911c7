"""Rotary position embedding: angles from positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Rotation(NamedTuple):
    """What positions do to queries and keys, all float32.

    Attributes:
        cos_TF, sin_TF: of the angle of each pair of dimensions, [T, H/2].
        query_T: factor of a token's queries; None is 1.
        key_TN: what query heads add to the scores of a token's key, before their scale; None is 0.
    """

    cos_TF: Array
    sin_TF: Array
    query_T: Array | None = None
    key_TN: Array | None = None


class Rope:
    """Turns positions into angles.

    `prompt_length_T` is the prompt length of each token's request, None when all tokens are one
    prompt.
    """

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        raise NotImplementedError

    def serving(self, length: int) -> Rope:
        """The same in an engine that serves sequences of up to `length` tokens."""
        return self


@dataclass(frozen=True)
class StaticRope(Rope):
    """Fixed frequencies.

    Attributes:
        inv_freq: radians per position of each pair of dimensions, H/2 numbers.
        scale: factor of cos and sin, for YaRN.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        inv_freq_F = jnp.asarray(self.inv_freq, jnp.float32)
        angle_TF = position_T.astype(jnp.float32)[:, None] * inv_freq_F
        return Rotation(jnp.cos(angle_TF) * self.scale, jnp.sin(angle_TF) * self.scale)


@dataclass(frozen=True)
class DynamicRope(Rope):
    """NTK scaling: the base grows with the sequence beyond `original` tokens.

    Tokens of a prompt use the base of its whole length; a generated token uses that of its own
    position. So cached keys are never rotated again, and one sequence gets what transformers
    computes. Keys of a prompt longer than `original` depend on its length: prompts of other lengths
    cannot share them.

    Attributes:
        theta: base of short sequences.
        dim: width of a head.
        factor: growth of the context.
        original: tokens of the native context.
    """

    theta: float
    dim: int
    factor: float
    original: int

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        if prompt_length_T is None:
            prompt_length = jnp.max(position_T) + 1
        else:
            prompt_length = prompt_length_T
        length_T = jnp.maximum(position_T + 1, prompt_length)
        growth_T = self.factor * length_T.astype(jnp.float32) / self.original - (self.factor - 1)
        growth_T = jnp.where(length_T > self.original, growth_T, 1.0)
        base_T = self.theta * growth_T ** (self.dim / (self.dim - 2))
        exponent_F = jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim
        angle_TF = position_T.astype(jnp.float32)[:, None] / base_T[:, None] ** exponent_F
        return Rotation(jnp.cos(angle_TF), jnp.sin(angle_TF))


@dataclass(frozen=True)
class LongRope(Rope):
    """One of two tables of frequencies: long for an engine that serves longer sequences than the
    model was first trained on, whatever the length of a sequence. So cached keys are never rotated
    again.

    Attributes:
        short, long: the tables.
        original: tokens of the first training.
        length: of the longest sequence that is served.
    """

    short: StaticRope
    long: StaticRope
    original: int
    length: int

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        if self.length > self.original:
            chosen = self.long
        else:
            chosen = self.short
        return chosen(position_T, prompt_length_T)

    def serving(self, length: int) -> Rope:
        return replace(self, length=length)


@dataclass(frozen=True)
class PartialRope(Rope):
    """Only the first pairs of a head turn; the angles of the other `passing` pairs are zero."""

    turning: Rope
    passing: int

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        turn = self.turning(position_T, prompt_length_T)
        wider = ((0, 0), (0, self.passing))
        cos_TF = jnp.pad(turn.cos_TF, wider, constant_values=1.0)
        return turn._replace(cos_TF=cos_TF, sin_TF=jnp.pad(turn.sin_TF, wider))

    def serving(self, length: int) -> Rope:
        return replace(self, turning=self.turning.serving(length))


@dataclass(frozen=True)
class NoRope(Rope):
    """The rotation of a layer without rotary embedding: none of the `pairs` turns."""

    pairs: int

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        shape = (position_T.shape[0], self.pairs)
        return Rotation(jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


@dataclass(frozen=True)
class Alibi(NoRope):
    """Nothing turns; scores grow with the position of the key, by a slope for each query head.

    By softmax that is the same as falling with the distance (https://arxiv.org/abs/2108.12409).
    """

    slopes: tuple[float, ...]

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        slope_N = jnp.asarray(self.slopes, jnp.float32)
        key_TN = self.added(position_T.astype(jnp.float32), slope_N)
        return super().__call__(position_T, prompt_length_T)._replace(key_TN=key_TN)

    def added(self, position_T: Array, slope_N: Array) -> Array:
        """The numbers `[T, N]` that are added to the scores of keys."""
        return position_T[:, None] * slope_N


class RoundedAlibi(Alibi):
    """ALiBi whose slopes, positions and products are rounded to bfloat16, as transformers does for
    Falcon."""

    def added(self, position_T: Array, slope_N: Array) -> Array:
        def rounded(x: Array) -> Array:
            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

        return rounded(super().added(rounded(position_T), rounded(slope_N)))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head: powers of 2^(-8/n) for the n heads that are a power of two, then the
    odd powers of 2^(-4/n) for the others."""
    whole = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    others = [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return (*first, *others)


@dataclass(frozen=True)
class QueryScaledRope(Rope):
    """A rope that also multiplies queries by 1 + beta · ln(1 + floor(position / original)), as
    Ministral 3 defines it: scores of long contexts stay as sharp as those of short ones.
    """

    turning: Rope
    beta: float
    original: float

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        times_T = jnp.floor(position_T.astype(jnp.float32) / self.original)
        turn = self.turning(position_T, prompt_length_T)
        return turn._replace(query_T=1 + self.beta * jnp.log1p(times_T))

    def serving(self, length: int) -> Rope:
        return replace(self, turning=self.turning.serving(length))


def rotary_order(dim: int, turning: int, paired: bool) -> tuple[int, ...]:
    """The checkpoint's number of each dimension of a head, in the order in which dimension i turns
    together with dimension i + dim/2.

    In the checkpoint the first `turning` dimensions turn, i together with i + turning/2, or 2i
    together with 2i + 1 where they are `paired`. () when that is the same order.
    """
    turned = tuple(range(turning))
    if paired:
        first = turned[::2]
        second = turned[1::2]
    else:
        first = turned[: turning // 2]
        second = turned[turning // 2 :]
    rest = tuple(range(turning, dim))
    half = (dim - turning) // 2
    order = (*first, *rest[:half], *second, *rest[half:])
    if order == tuple(range(dim)):
        return ()
    return order
