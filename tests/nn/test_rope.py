"""Rotary embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.nn.rope import DynamicRope, Rotation, StaticRope
from pallas_kernels.rope_write import HeadRows, rotated

INV_FREQ = tuple(10000.0 ** -(i / 8) for i in range(0, 8, 2))


def rotate(x_TNH: jax.Array, rotation: Rotation) -> jax.Array:
    """The query heads of rows that have no others."""
    return rotated(
        HeadRows(x_TNH, *rotation[:2], bias=None, norms=None, eps=0.0, queries=x_TNH.shape[1])
    )[0]


def test_position_zero_is_not_rotated() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    np.testing.assert_array_equal(rotate(x, StaticRope(INV_FREQ)(jnp.zeros(1, jnp.int32), None)), x)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    rope = StaticRope(INV_FREQ)

    def score(at_q: int, at_k: int) -> float:
        return float(
            jnp.vdot(
                rotate(q, rope(jnp.array([at_q]), None)), rotate(k, rope(jnp.array([at_k]), None))
            )
        )

    assert abs(score(9, 4) - score(105, 100)) < 1e-4
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_the_attention_factor_scales_the_rotated_head() -> None:
    x, position = jax.random.normal(jax.random.key(0), (2, 1, 8)), jnp.array([3, 7])
    np.testing.assert_allclose(
        rotate(x, StaticRope(INV_FREQ, 1.5)(position, None)),
        1.5 * rotate(x, StaticRope(INV_FREQ)(position, None)),
        rtol=1e-6,
    )


def test_dynamic_scaling_is_plain_rope_up_to_the_original_length() -> None:
    position = jnp.arange(64)
    dynamic = DynamicRope(10000.0, 8, 4.0, 64)(position, jnp.full(64, 64))
    for found, expected in zip(dynamic[:2], StaticRope(INV_FREQ)(position, None)[:2], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_dynamic_scaling_uses_the_prompt_length_for_a_prompt_and_the_position_after_it() -> None:
    rope, position = DynamicRope(10000.0, 8, 4.0, 64), jnp.array([5, 99, 100, 120])
    cos = rope(position, jnp.full(4, 100)).cos_TF

    def base(length: int) -> float:
        return 10000.0 * (4.0 * length / 64 - 3.0) ** (8 / 6)

    for row, (at, length) in enumerate([(5, 100), (99, 100), (100, 101), (120, 121)]):
        np.testing.assert_allclose(
            cos[row], [np.cos(at / base(length) ** (i / 8)) for i in range(0, 8, 2)], atol=1e-5
        )


def test_without_prompt_lengths_all_tokens_are_one_prompt() -> None:
    rope, position = DynamicRope(10000.0, 8, 4.0, 64), jnp.arange(100)
    for found, expected in zip(
        rope(position, None), rope(position, jnp.full(100, 100)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
