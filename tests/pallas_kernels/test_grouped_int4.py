"""Products with the 4-bit weights of experts: the kernel in the interpreter and on a card."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import by_tile, group
from pallas_kernels.grouped_matmul.cases import choices
from pallas_kernels.int4_matmul import Int4, int4_matmul
from pallas_kernels.int4_matmul.cases import Case, inputs, packed
from pallas_kernels.int4_matmul.mosaic_grouped import grouped_int4_matmul
from pallas_kernels.int4_matmul.plan import widths_of
from tests.pallas_kernels.places import launch_options, places, relative_error

EXPERTS, CHOICES = 6, 2


def experts(case: Case, dtype: str) -> Int4:
    made = [packed(case, inputs(case, seed)[1], dtype) for seed in range(EXPERTS)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


@pytest.mark.slow
@places
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner", "group_size", "form"),
    [
        (3, 384, 160, 32, "fp4"),
        (3, 192, 160, 32, "fp4"),
        (3, 128, 160, 64, "nf4"),
        (1, 64, 128, 128, "zeros"),
        (40, 128, 192, 64, "symmetric"),
        (40, 384, 64, 64, "zeros"),
        (200, 256, 200, 16, "offsets"),
        (200, 100, 200, 16, "offsets"),
    ],
)
@pytest.mark.parametrize("gating", [SILU, None], ids=("gated", "plain"))
def test_rows_meet_the_weight_of_their_expert(
    place: str, tokens: int, outputs: int, inner: int, group_size: int, form: str, gating: Any
) -> None:
    case = Case(name="", tokens=tokens, outputs=outputs, inputs=inner, group=group_size, form=form)
    w, x = experts(case, "bfloat16"), jnp.asarray(inputs(case)[0], jnp.bfloat16)
    expert = choices(tokens, EXPERTS, CHOICES, 1.0, np.random.default_rng(0))
    groups = group(jnp.asarray(expert), EXPERTS)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(EXPERTS, outputs)), jnp.bfloat16)
    call = functools.partial(grouped_int4_matmul, gating=gating, **launch_options(place))
    got = np.asarray(jax.jit(call)(x, w, groups, bias))

    def product(x_RI: jax.Array, e: jax.Array) -> jax.Array:
        return int4_matmul(x_RI, jax.tree.map(lambda leaf: leaf[e], w), backend="reference")

    wanted = functools.partial(by_tile, product, groups=groups, bias_EO=bias, gating=gating)(x)
    rows = np.asarray(groups.place_TK).reshape(-1)  # others are arbitrary
    assert got.shape == wanted.shape
    assert relative_error(got[rows], np.asarray(wanted)[rows]) < 5e-3


@pytest.mark.parametrize("tile", [8, 16, 32, 64, 128])
def test_products_are_a_quarter_of_a_tile_wider_than_its_rows_at_most(tile: int) -> None:
    widths = widths_of(tile)
    assert widths[-1] == tile and all(width % 8 == 0 for width in widths)
    for rows in range(1, tile + 1):
        width = min(width for width in widths if width >= rows)
        assert width - rows < max(8, tile / 4)
