"""Rotary position embedding: angles from positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jax import Array

type Rotation = tuple[Array, Array]  # cos and sin, float32 [T, H/2]


class Rope(Protocol):
    """Angles of each token. `prompt_length_T` is the prompt length of each token's request, None
    when all tokens are one prompt."""

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation: ...


@dataclass(frozen=True)
class StaticRope:
    """Fixed inverse frequencies (H/2 of them); `scale` multiplies cos and sin, as YaRN asks."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def __call__(self, position_T: Array, prompt_length_T: Array | None) -> Rotation:
        inv_freq_F = jnp.asarray(self.inv_freq, jnp.float32)
        angle_TF = position_T.astype(jnp.float32)[:, None] * inv_freq_F
        return jnp.cos(angle_TF) * self.scale, jnp.sin(angle_TF) * self.scale


@dataclass(frozen=True)
class DynamicRope:
    """NTK scaling whose base grows with the sequence once it exceeds `original` tokens.

    A prompt's tokens use the base of the prompt's whole length, a generated token the base of its
    own position. With those two rules a cached key never has to be rotated again, and both are what
    transformers computes for one sequence. Keys of a prompt longer than `original` depend on its
    length, so prompts of different lengths cannot share them.
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
