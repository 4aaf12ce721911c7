"""Where a kernel test runs: in Pallas' GPU interpreter on a CPU, or compiled on a card.

A test marked `@places` takes `place` and runs in the interpreter by default, with race detection
and memory that starts as NaN. `make test-gpu` runs it compiled, and larger.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETER, CARD = "interpreter", "card"
STATIC = (
    *("eps", "filters", "gating", "interpret", "no_split", "rounding", "scale", "softcap"),
    *("tuning", "window"),
)
card = pytest.param(CARD, marks=pytest.mark.gpu)
places = pytest.mark.parametrize("place", [INTERPRETER, card])
slow_places = pytest.mark.parametrize(
    "place", [pytest.param(INTERPRETER, marks=pytest.mark.slow), card]
)


def launch_options(place: str, detect_races: bool = True) -> dict[str, Any]:
    """Keyword arguments of a Mosaic GPU back end: its `interpret`, or nothing on the card."""
    if place == CARD:
        return {}
    return {"interpret": plgpu.InterpretGPUParams(detect_races=detect_races)}


@functools.cache
def jitted(function: Callable[..., Any], *donated: str) -> Any:
    """A Mosaic GPU back end, jitted with its sizes and options static and these arguments donated;
    kept, so that tests of equal shapes compile once."""
    parameters = inspect.signature(function).parameters.values()
    known = {each.name for each in parameters}
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    static = [name for name in STATIC if takes_all or name in known]
    return jax.jit(function, static_argnames=static, donate_argnames=donated)


def pick(place: str, small: Any, large: Any) -> Any:
    """`small` in the interpreter, `large` on the card."""
    return large if place == CARD else small


def poison_outputs(place: str, *outputs: jax.ShapeDtypeStruct) -> None:
    """Leave NaN where the next arrays of these shapes are likely to lie, so that an element that a
    kernel does not write shows. The interpreter fills its memory with NaN by itself."""
    if place == CARD:
        for output in outputs:
            size = -(-output.size * output.dtype.itemsize // 4)
            stale = [jnp.full((size,), jnp.nan, jnp.float32) for _ in range(4)]
            jax.block_until_ready(stale)
            for array in stale:
                array.delete()


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, for `poison_outputs`."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def relative_error(got: Any, wanted: Any) -> float:
    """Frobenius norm of the difference over that of `wanted`. NaN stays NaN, which fails every
    comparison."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))
