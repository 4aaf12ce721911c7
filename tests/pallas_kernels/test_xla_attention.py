"""The fallback back ends of both attention ops: the shared cases in wide and narrow types, and
lowering for accelerators."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_extend, xla
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_extend import cases as extend_cases
from tests.pallas_kernels.covering import covering

OPS = {
    "decode": (paged_decode.decode_attention, decode_cases),
    "extend": (paged_extend.extend_attention, extend_cases),
}
CASES = {(op, case.name): case for op, (_, table) in OPS.items() for case in table.CASES}
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3}


def relative_error(op: str, case: Any, dtype: str) -> float:
    """Error against the definition; NaN stays NaN and fails every comparison."""
    attend, table = OPS[op]
    made = table.inputs(case)
    args = [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in made.args]
    out = jax.jit(functools.partial(attend, backend="xla", **case.options))(*args)
    assert out.dtype == dtype
    return float(
        np.linalg.norm(np.asarray(out, np.float64) - made.expected)
        / max(np.linalg.norm(made.expected), 1e-9)
    )


@pytest.mark.parametrize(
    ("op", "case"), [each for op, (_, table) in OPS.items() for each in covering(table.CASES, op)]
)
def test_every_shared_case_passes(op: str, case: Any) -> None:
    assert relative_error(op, case, "float32") < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "name"),
    [("decode", "groups of seven"), ("extend", "window"), ("extend", "infinite poison")],
)
def test_narrow_types_lose_only_their_own_rounding(op: str, name: str, dtype: str) -> None:
    assert relative_error(op, CASES[op, name], dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", OPS)
def test_many_small_tiles_give_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "MIN_TILE_TOKENS", 1)
    monkeypatch.setattr(xla, "TILE_BYTES", 1)
    assert relative_error(op, CASES[op, "softcap and window"], "float32") < TOLERANCE["float32"]
    assert relative_error(op, CASES[op, "around a tile's edge"], "float32") < TOLERANCE["float32"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_lowers_with_products_in_the_pools_type(op: str, platform: str) -> None:
    pool = jax.ShapeDtypeStruct((256, 8, 64, 80), jnp.bfloat16)
    ints = [
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((8, 128), *((8,),) * (1 if op == "decode" else 3))
    ]
    q = jax.ShapeDtypeStruct((8 if op == "decode" else 512, 32, 80), jnp.bfloat16)
    text = jax.jit(functools.partial(OPS[op][0], backend="xla", scale=0.1)).trace(
        q, pool, pool, *ints
    )
    lines = text.lower(lowering_platforms=(platform,)).as_text().splitlines()
    products = [line.rsplit(" : ", 1)[1] for line in lines if "dot_general" in line]
    assert len(products) == 2
    for operands, result in (product.split("->") for product in products):
        assert operands.count("xbf16>") == 2
        assert "xf32>" in result


def test_pools_that_do_not_fit_the_queries_are_an_error() -> None:
    pages, row = jnp.zeros((3, 2, 16, 64)), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="heads divide the query heads"):
        paged_decode.decode_attention(
            jnp.zeros((1, 3, 64)), pages, pages, row[:, None], row, backend="xla", scale=1.0
        )
