"""Rotation and write of keys and values: every back end passes the shared cases, in place; the
Hopper one interpreted and lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import UnknownBackend
from pallas_kernels.rope_write import HeadRows, mosaic_gpu, rope_write
from pallas_kernels.rope_write.cases import CASES, Case, inputs
from tests.pallas_kernels.places import jitted

HOPPER = [case for case in CASES if case.head_dim in (64, 96, 128, 256) and case.kept < 20]
plain = jax.jit(rope_write, static_argnames="backend")


def arguments(case: Case, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """The positional arguments of a case in one type; angles stay float32."""
    given = inputs(case)
    low = functools.partial(jnp.asarray, dtype=dtype)
    bias = None if given.bias is None else low(given.bias)
    norms = None if given.norms is None else (low(given.norms[0]), low(given.norms[1]))
    angles = jnp.asarray(given.cos), jnp.asarray(given.sin)
    rows = HeadRows(
        low(given.qkv),
        *angles,
        bias=bias,
        norms=norms,
        eps=case.eps,
        queries=case.heads,
        dim=case.dim,
    )
    return (
        rows,
        low(given.k_pages),
        low(given.v_pages),
        jnp.asarray(given.page),
        jnp.asarray(given.offset),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_equals_float64(case: Case) -> None:
    for got, want in zip(
        plain(*arguments(case), backend="reference"), inputs(case).expected, strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_but_the_tokens_places_changes(case: Case) -> None:
    _, k_pages, v_pages, page, offset = given = arguments(case)
    _, k_new, v_new = plain(*given, backend="reference")
    kept = page < case.num_pages
    for old, new in ((k_pages, k_new), (v_pages, v_new)):
        rest = np.ones((case.num_pages, case.page_size), bool)
        rest[page[kept], offset[kept]] = False
        np.testing.assert_array_equal(
            np.moveaxis(np.asarray(new), 2, 1)[rest], np.moveaxis(np.asarray(old), 2, 1)[rest]
        )


def test_the_result_is_rounded_once() -> None:
    case = CASES[-1]
    low = arguments(case, jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, low)
    for got, want in zip(
        plain(*low, backend="reference"), plain(*wide, backend="reference"), strict=True
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_a_donated_pool_is_written_in_place() -> None:
    given = arguments(Case(name="large", kept=8, num_pages=256))
    pool = given[1].nbytes
    compiled = (
        jax.jit(rope_write, static_argnames="backend", donate_argnums=(1, 2))
        .lower(*given, backend="reference")
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pool
    assert memory.temp_size_in_bytes < pool / 10
    assert [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and "256,2,16,64" in line
    ] == []


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        pytest.param(
            dtype,
            case,
            id=f"{dtype}-{case.name}",
            marks=[] if (dtype == "bfloat16") != bool(case.bias) else pytest.mark.slow,
        )
        for dtype in ("bfloat16", "float16")
        for case in HOPPER
    ],
)
def test_the_interpreted_kernel_equals_the_reference_up_to_rounding(case: Case, dtype: str) -> None:
    low = arguments(case, dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, low)
    wanted = plain(*wide, backend="reference")
    got = jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")(
        *low, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), y, rtol=2**-8 if dtype == "bfloat16" else 2**-10, atol=1e-6
        )


HEADS = [(28, 4), (16, 8), (14, 2), (7, 1), (40, 8), (64, 8), (12, 12), (3, 3)]
GRID = [(64, False), (64, True), (128, False), (128, True), (256, False), (256, True)]
IN_THREES = [((32, 32), True), ((4, 4), False), ((6, 2), False), ((3, 1), True)]  # heads of 96


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "large"),
    [
        # Of each a small and a large one
        pytest.param(*heads, *each, marks=[] if (i - j) % len(GRID) in (0, 3) else pytest.mark.slow)
        for i, heads in enumerate(HEADS)
        for j, each in enumerate(GRID)
    ]
    + [
        pytest.param(*heads, 96, large, marks=[] if heads == (6, 2) else pytest.mark.slow)
        for heads, large in IN_THREES
    ],
)
def test_the_kernel_lowers_for_cuda_and_aliases_the_pools(
    heads: int, kv_heads: int, head_dim: int, large: bool
) -> None:
    tokens = 2048 if large else 3
    low, angles = (
        functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32),
    )
    norms, bias = (
        ((low((head_dim,)),) * 2, low((heads + 2 * kv_heads, head_dim))) if large else (None, None)
    )
    rows = HeadRows(
        low((tokens, heads + 2 * kv_heads, head_dim)),
        angles,
        angles,
        bias=bias,
        norms=norms,
        eps=1e-6,
        queries=heads,
    )
    pool, ints = low((64, kv_heads, 64, head_dim)), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    text = (
        jitted(mosaic_gpu.rope_write, "k_pages", "v_pages", "scales")
        .trace(rows, pool, pool, ints, ints)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == 2
    assert text.count("#stablehlo.output_operand_alias<") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 32}, "head_dim 64, 96, 128 or 256"),
        ({"dtype": "float32"}, "bfloat16 or float16 throughout"),
        ({"kv_heads": 3}, "pools of 2 heads"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(change: dict[str, Any], message: str) -> None:
    given = arguments(
        Case(name="refused", kept=2, head_dim=change.get("head_dim", 64)),
        change.get("dtype", "bfloat16"),
    )
    pools = [jnp.repeat(x, 2, axis=1)[:, : change.get("kv_heads", 2)] for x in given[1:3]]
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.rope_write(given[0], *pools, *given[3:])


def test_an_unknown_back_end_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        UnknownBackend,
        match=r"rope_write has no back end 'cuda'; choose one of: reference, mosaic_gpu",
    ):
        rope_write(*arguments(CASES[0]), backend="cuda")
