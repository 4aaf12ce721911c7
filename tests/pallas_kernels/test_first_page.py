"""A layer's pages in the midst of a pool: every op and back end finds them by `first_page`, and
touches no other layer's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as hopper_decode
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.paged_extend import mosaic_gpu as hopper_extend
from pallas_kernels.quantised import SCALE_DTYPE, quantise
from pallas_kernels.rope_write import mosaic_gpu as hopper_write
from pallas_kernels.rope_write import rope_write
from pallas_kernels.rope_write.cases import Case as Write
from tests.pallas_kernels.test_rope_write import arguments

DECODE = decode_cases.Case(name="decode", lengths=(5, 0, 70), heads=4, kv_heads=2, page_size=64)
EXTEND = extend_cases.Case(name="extend", rows=((70, 5), (3, 3)), heads=4, kv_heads=2, page_size=64)
LAYERS, LAYER = 3, 1
quiet = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered:RuntimeWarning",
)


def among_others(pages: Any, own: int = LAYER) -> jax.Array:
    """A pool of several layers, of which one has these pages and the others hold what would
    show."""
    other = jnp.full(pages.shape, jnp.nan, pages.dtype)
    return jnp.concatenate([jnp.asarray(pages) if n == own else other for n in range(LAYERS)])


def first(pages: Any, own: int = LAYER) -> jax.Array:
    return jnp.array([own * pages.shape[0]], jnp.int32)


def both(op: Any, given: Any, dtype: str, eight: bool, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    """What an op makes of a layer's pages at the head of a pool, where `first_page` changes
    nothing, and in its midst: one program, since compiling it is what costs."""
    q, k, v, *rows = (jnp.asarray(x, dtype if x.dtype == np.float32 else None) for x in given.args)
    pools, scales = [k, v], None
    if eight:
        narrow = jax.jit(lambda x: quantise(x.astype(jnp.float32), "float8_e4m3fn"))
        (k8, ks), (v8, vs) = narrow(k), narrow(v)
        hidden = jnp.isnan(k[..., 0])[:, :, None]
        pools, scales = (
            [k8, v8],
            jnp.where(hidden, jnp.nan, jnp.stack([ks, vs], axis=2)).astype(SCALE_DTYPE),
        )
    run = jax.jit(lambda *args, **more: op(*args, **how, **more))

    def at(own: int) -> np.ndarray:
        more = {} if scales is None else {"scales": among_others(scales, own)}
        placed = [among_others(pool, own) for pool in pools]
        return np.asarray(run(q, *placed, *rows, first_page=first(k, own), **more), np.float32)

    return at(0), at(LAYER)


@quiet
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_back_ends_in_plain_jax(backend: str, eight: bool) -> None:
    for op, cases, case in (
        (paged_decode.decode_attention, decode_cases, DECODE),
        (paged_extend.extend_attention, extend_cases, EXTEND),
    ):
        one, among = both(op, cases.inputs(case), "float32", eight, backend=backend, **case.options)
        assert np.abs(one).max() > 0
        np.testing.assert_array_equal(one, among)


@quiet
@pytest.mark.parametrize(
    ("cluster", "eight"),
    [
        (0, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, False), (0, True))),
    ],
)
@pytest.mark.slow
def test_decode_for_hopper(cluster: int, eight: bool) -> None:
    tuning = hopper_decode.Tuning(stages=2, blocks=4, cluster=cluster)
    how = {
        "tuning": tuning,
        "interpret": plgpu.InterpretGPUParams(detect_races=True),
        **DECODE.options,
    }
    one, among = both(
        hopper_decode.decode_attention, decode_cases.inputs(DECODE), "bfloat16", eight, **how
    )
    # The interpreted clusters leave the others as they are
    live = decode_cases.inputs(DECODE).lengths > 0
    assert np.abs(one[live]).max() > 0
    np.testing.assert_array_equal(one[live], among[live])


@quiet
@pytest.mark.slow  # finds its pages as decode does
@pytest.mark.parametrize("eight", [False, True])
def test_extend_for_hopper(eight: bool) -> None:
    tuning = hopper_extend.Tuning(groups=1, stages=2, blocks=4, min_tiles=1)
    how = {
        "tuning": tuning,
        "interpret": plgpu.InterpretGPUParams(detect_races=True),
        **EXTEND.options,
    }
    one, among = both(
        hopper_extend.extend_attention, extend_cases.inputs(EXTEND), "bfloat16", eight, **how
    )
    assert np.abs(one).max() > 0
    np.testing.assert_array_equal(one, among)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("eight", [False, True])
def test_writes(hopper: bool, eight: bool) -> None:
    case = Write(name="write", kept=5, dropped=2, heads=4, kv_heads=2, head_dim=64)
    rows, k, v, page, offset = arguments(case, "bfloat16")
    pools = [k, v]
    if eight:
        pools = [x.astype("float8_e4m3fn") for x in (k, v)] + [
            jnp.ones((*k.shape[:2], 2, k.shape[2]), SCALE_DTYPE)
        ]
    how = (
        {"interpret": plgpu.InterpretGPUParams(detect_races=True)}
        if hopper
        else {"backend": "reference"}
    )
    write: Any = hopper_write.rope_write if hopper else rope_write

    @jax.jit
    def run(pools: Any, *places: Any) -> Any:
        return write(rows, *pools[:2], *places, scales=pools[2] if eight else None, **how)

    q, *written = run(pools, page, offset)
    nowhere = jnp.where(page >= case.num_pages, 2**30, page)
    assert int((nowhere == 2**30).sum()) > 0
    q_too, *among = run([*map(among_others, pools)], nowhere, offset, first(k))
    np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(q_too, np.float32))
    for alone, pool in zip(written, among, strict=True):
        np.testing.assert_array_equal(
            np.asarray(pool, np.float32), np.asarray(among_others(alone), np.float32)
        )
