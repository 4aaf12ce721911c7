"""What pages behind a window hold is nobody's concern: they are given to other requests, which may
write NaN there."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxllm.cache.backends import tile_tokens
from jaxllm.cache.pool import Lifetime
from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_extend import cases as extend_cases

WINDOW, PAGE = 100, 32
SIZES: dict[str, Any] = {
    "window": WINDOW,
    "page_size": PAGE,
    "head_dim": 128,
    "heads": 2,
    "kv_heads": 1,
}
DECODE = decode_cases.Case(name="behind", lengths=(500, 64, 331, 0, 389), **SIZES)
EXTEND = extend_cases.Case(name="behind", rows=((400, 40), (0, 30), (300, 1)), **SIZES)
INTERPRET = {"mosaic_gpu": plgpu.InterpretGPUParams(), "mosaic_tpu": pltpu.InterpretParams()}


def invalidated(pages: Any, positions: list[int], tile: int) -> np.ndarray:
    """The page table with another request's page of NaN in place of what was given back before the
    tokens from each position on."""
    table = pages.table.copy()
    foreign = next(page for page in range(len(pages.k)) if np.isnan(pages.k[page]).all())
    for row, position in enumerate(positions):
        table[row, : Lifetime(WINDOW, 1, tile).out_of_window(position, PAGE)] = foreign
    assert (table == foreign).sum() > 5
    return table


def error(op: str, backend: str, tile: int) -> float:
    """Of the outputs of all tokens; NaN stays NaN and fails every comparison."""
    if op == "decode":
        given: Any = decode_cases.inputs(DECODE)
        positions, attend, case = (
            [length - 1 for length in DECODE.lengths],
            paged_decode.decode_attention,
            DECODE,
        )
    else:
        given = extend_cases.inputs(EXTEND)
        positions, attend, case = (
            [prefix for prefix, _ in EXTEND.rows],
            paged_extend.extend_attention,
            EXTEND,
        )
    table = invalidated(given.pages, positions, tile)
    args = [table if a is given.pages.table else a for a in given.args]
    dtype = "bfloat16" if backend.startswith("mosaic") else "float32"
    low = [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in args]
    options = case.options | ({"interpret": INTERPRET[backend]} if backend in INTERPRET else {})
    out = np.asarray(
        jax.jit(functools.partial(attend, backend=backend, **options))(*low), np.float64
    )
    return float(np.linalg.norm(out - given.expected) / np.linalg.norm(given.expected))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "op"),
    [
        *(
            (backend, op)
            for backend in ("reference", "xla", "mosaic_tpu")
            for op in ("decode", "extend")
        ),
        *(pytest.param("mosaic_gpu", op, marks=pytest.mark.slow) for op in ("decode", "extend")),
    ],
)
def test_no_kernel_lets_through_what_lies_behind_a_window_by_a_tile(backend: str, op: str) -> None:
    assert error(op, backend, tile_tokens(backend)) < 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_hopper_kernels_do_read_the_rest_of_a_tile() -> None:
    assert np.isnan(error("extend", "mosaic_gpu", 1)), "or their pages could be given back sooner"
