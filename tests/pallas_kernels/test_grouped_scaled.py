"""Products with the 8-bit weights of experts: the kernel in the interpreter and on a card."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_matmul import SILU
from pallas_kernels.grouped_matmul import Groups, group
from pallas_kernels.grouped_matmul.cases import choices
from pallas_kernels.scaled_matmul import ScaledExperts, mosaic_grouped, rounded
from pallas_kernels.scaled_matmul.mosaic_grouped import grouped_scaled_matmul
from pallas_kernels.scaled_matmul.rounding import rounded_inputs, spread
from tests.pallas_kernels.places import launch_options, places, relative_error, slow_places

ERROR = 2.5e-3  # one rounding to bfloat16
EXPERTS, CHOICES = 6, 2


@dataclass(frozen=True)
class Case:
    """A product of experts; `rows`: x holds the rows of tiles, not tokens."""

    tokens: int
    outputs: int
    columns: int
    inputs: str = "token"
    group: int | None = None
    gated: bool = False
    biased: bool = False
    rows: bool = False
    integers: bool = False
    warpgroups: int | None = None


def weights(case: Case) -> ScaledExperts:
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((EXPERTS, case.outputs, case.columns)) / case.columns**0.5
    dtype = jnp.int8 if case.integers else jnp.float8_e4m3fn
    size = case.group or case.columns
    values, scale = rounded(jnp.asarray(plain, jnp.float32), dtype, size)
    given = jnp.linspace(0.005, 0.02, EXPERTS) if case.inputs == "given" else None
    return ScaledExperts(values, scale, size, case.inputs, given)


def expected(case: Case, x: Any, w: ScaledExperts, bias: Any, expert: Any) -> np.ndarray:
    """Each row's product in float64, of inputs rounded as the definition says."""
    y = np.zeros((len(x), case.outputs))
    for e in np.unique(expert):
        own = np.flatnonzero(expert == e)
        given = None if w.input_scale is None else w.input_scale[e]
        numbers, scale = rounded_inputs(x[own], w.values.dtype, w.group, w.inputs, given)
        exact = np.float64(numbers) * np.float64(spread(scale, w.group, case.columns))
        weight = np.float64(w.values[e]) * np.float64(spread(w.scale[e], w.group, case.columns))
        y[own] = exact @ weight.T + (0 if bias is None else np.float64(bias[e]))
    if not case.gated:
        return y
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@functools.cache
def kernel(place: str, gated: bool, warpgroups: int | None) -> Any:
    options = launch_options(place) | {"warpgroups": warpgroups}
    gating = SILU if gated else None

    def call(x: Any, values: Any, scale: Any, given: Any, groups: Groups, bias: Any, form: Any):  # type: ignore[no-untyped-def]
        w = ScaledExperts(values, scale, *form, given)
        return grouped_scaled_matmul(x, w, groups, bias, gating, **options)

    return jax.jit(call, static_argnames="form")


def check(place: str, case: Case) -> None:
    rng = np.random.default_rng(2)
    w = weights(case)
    chosen = choices(case.tokens, EXPERTS, CHOICES, 1.0, rng)
    groups = group(jnp.asarray(chosen), EXPERTS)
    x = jnp.asarray(rng.standard_normal((case.tokens, case.columns)), jnp.bfloat16)
    taken = np.asarray(groups.place_TK)
    bias = jnp.asarray(rng.standard_normal((EXPERTS, case.outputs)), jnp.bfloat16)
    bias = bias if case.biased else None
    row_x = np.repeat(np.asarray(x), CHOICES, axis=0)
    if case.rows:
        row_x = jnp.asarray(rng.standard_normal(row_x.shape), jnp.bfloat16)
        x = jnp.full((groups.rows, case.columns), jnp.nan, jnp.bfloat16)
        x = x.at[taken.reshape(-1)].set(row_x)
    got = kernel(place, case.gated, case.warpgroups)(
        x, w.values, w.scale, w.input_scale, groups, bias, form=(w.group, w.inputs)
    )
    wanted = expected(case, row_x, w, bias, chosen.reshape(-1))
    assert relative_error(np.asarray(got)[taken.reshape(-1)], wanted) < ERROR


@places
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=3, outputs=128, columns=128, gated=True),
        pytest.param(
            Case(tokens=40, outputs=192, columns=256, inputs="group", group=128, rows=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=("tokens, gated", "blocks of rows"),
)
def test_rows_meet_the_weight_of_their_expert(place: str, case: Case) -> None:
    check(place, case)


@slow_places
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=3, outputs=256, columns=256, gated=True),
        Case(tokens=1, outputs=128, columns=128, biased=True),
        Case(tokens=40, outputs=256, columns=384, gated=True, biased=True),
        Case(tokens=40, outputs=192, columns=384, rows=True),
        Case(tokens=9, outputs=192, columns=128, rows=True),
        Case(tokens=20, outputs=128, columns=256, inputs="given", gated=True),
        Case(tokens=5, outputs=128, columns=256, inputs="given"),
        Case(tokens=33, outputs=128, columns=256, inputs="group", group=128, gated=True),
        Case(tokens=7, outputs=128, columns=256, inputs="group", group=128, biased=True),
        Case(tokens=7, outputs=128, columns=256, group=128, rows=True),
        Case(tokens=40, outputs=384, columns=384, gated=True, warpgroups=2),
        Case(tokens=5, outputs=320, columns=128, warpgroups=2),
        Case(tokens=400, outputs=128, columns=256, gated=True),
        Case(tokens=400, outputs=192, columns=256, inputs="group", group=128),
        Case(tokens=20, outputs=128, columns=256, integers=True, gated=True),
        Case(tokens=6, outputs=64, columns=256, integers=True, rows=True),
    ],
    ids=lambda case: f"{case.tokens}x{case.outputs}x{case.columns}-{case.inputs}",
)
def test_every_form_of_scales_and_rows_is_right(place: str, case: Case) -> None:
    check(place, case)


def test_what_it_does_not_take_is_refused() -> None:
    case = Case(tokens=3, outputs=128, columns=128)
    groups = group(jnp.zeros((3, 1), jnp.int32), EXPERTS)
    x, w = jnp.zeros((3, 128), jnp.bfloat16), weights(case)
    mosaic_grouped.check(x, w, groups, SILU)
    mosaic_grouped.check(x, replace(w, inputs="plain"), groups, None)
    with pytest.raises(ValueError, match="O a multiple of 128"):
        mosaic_grouped.check(x, replace(w, values=w.values[:, :64]), groups, SILU)
    narrow = replace(w, scale=jnp.ones((EXPERTS, 128, 2)), group=64)
    with pytest.raises(ValueError, match="groups of 128"):
        mosaic_grouped.check(x, narrow, groups, None)
