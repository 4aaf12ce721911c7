"""Rotary position embedding: angles from positions."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

type Rotation = tuple[Array, Array]  # cos and sin, float32 [T, H/2]


@dataclass(frozen=True)
class StaticRope:
    """Fixed frequencies.

    `prompt_length_T` is the prompt length of each token's request, None when all tokens are one
    prompt.

    Attributes:
        inv_freq: radians per position of each pair of dimensions, H/2 numbers.
        scale: factor of cos and sin, for YaRN.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        inv_freq_F = jnp.asarray(self.inv_freq, jnp.float32)
        angle_TF = position_T.astype(jnp.float32)[:, None] * inv_freq_F
        return jnp.cos(angle_TF) * self.scale, jnp.sin(angle_TF) * self.scale


@dataclass(frozen=True)
class DynamicRope:
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
        prompt_length = jnp.max(position_T) + 1 if prompt_length_T is None else prompt_length_T
        length_T = jnp.maximum(position_T + 1, prompt_length)
        growth_T = self.factor * length_T.astype(jnp.float32) / self.original - (self.factor - 1)
        growth_T = jnp.where(length_T > self.original, growth_T, 1.0)
        base_T = self.theta * growth_T ** (self.dim / (self.dim - 2))
        exponent_F = jnp.arange(0, self.dim, 2, dtype=jnp.float32) / self.dim
        angle_TF = position_T.astype(jnp.float32)[:, None] / base_T[:, None] ** exponent_F
        return jnp.cos(angle_TF), jnp.sin(angle_TF)


type Rope = StaticRope | DynamicRope
