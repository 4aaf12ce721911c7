"""What the comparison of lowered programs sees, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from tests.engine.runtime.lowered_programs import normalised

SHAPES = (jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32))


def text_of(function: Callable[..., Array], *shapes: jax.ShapeDtypeStruct) -> str:
    return normalised(jax.jit(function, keep_unused=True).lower(*shapes).as_text())


def scaled(x_TD: Array, weight_D: Array) -> Array:
    return jnp.tanh(jax.jit(jnp.square)(x_TD)) * weight_D


def renamed(weight_D: Array, rows_TD: Array) -> Array:
    square = jax.jit(lambda numbers: jnp.square(numbers))
    return jnp.tanh(square(rows_TD)) * weight_D


def test_names_and_the_order_of_parameters_are_not_seen() -> None:
    assert text_of(scaled, *SHAPES) == text_of(renamed, *reversed(SHAPES))


@pytest.mark.parametrize(
    "other",
    [
        lambda x_TD, weight_D: jnp.sin(jax.jit(jnp.square)(x_TD)) * weight_D,
        lambda x_TD, weight_D: jnp.tanh(jax.jit(jnp.square)(x_TD)) * weight_D[0],
        lambda x_TD, weight_D: jnp.tanh(jax.jit(jnp.square)(x_TD)) * weight_D + 0.5,
    ],
)
def test_another_operation_is_seen(other: Callable[..., Array]) -> None:
    assert text_of(scaled, *SHAPES) != text_of(other, *SHAPES)


def test_another_type_is_seen() -> None:
    narrow = tuple(jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16) for shape in SHAPES)
    assert text_of(scaled, *SHAPES) != text_of(scaled, *narrow)


def test_a_donated_parameter_is_seen() -> None:
    donating = jax.jit(scaled, donate_argnums=0).lower(*SHAPES).as_text()
    assert normalised(donating) != text_of(scaled, *SHAPES)
