"""Edges of pages, windows and rows: both attention ops in plain JAX against float64, where lengths
and windows end exactly at a page, one before and one after."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import items, mosaic_tpu, paged_decode, paged_extend
from pallas_kernels.layout import Pages, dense_attention, in_pages

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 16
EDGES = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 8 * PAGE - 1, 8 * PAGE, 8 * PAGE + 1)
backends = pytest.mark.parametrize("backend", ["reference", "xla"])
windows = pytest.mark.parametrize(
    "window",
    [
        None,
        PAGE,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(PAGE - 1, marks=pytest.mark.slow),
        pytest.param(PAGE + 1, marks=pytest.mark.slow),
    ],
)


@functools.cache
def run(op: str, backend: str, window: int | None) -> Any:
    """The jitted op of a back end; tests of one window share it."""
    function = getattr(paged_decode if op == "decode" else paged_extend, f"{op}_attention")
    return jax.jit(functools.partial(function, backend=backend, scale=0.3, window=window))


@functools.cache
def made(lengths: tuple[int, ...]) -> tuple[list[np.ndarray], Pages]:
    """Sequences of these lengths, and their pages among NaN."""
    rng = np.random.default_rng(sum(lengths))
    sequences = [rng.standard_normal((2, n, KV_HEADS, DIM)).astype(np.float32) for n in lengths]
    pages = in_pages([s[0] for s in sequences], [s[1] for s in sequences], PAGE, 1, np.nan, 0)
    return sequences, pages


def wanted(q: np.ndarray, sequence: np.ndarray, window: int | None) -> np.ndarray:
    return dense_attention(q, *sequence, scale=0.3, window=window, softcap=None)


@backends
@windows
def test_a_decode_at_every_edge_sees_its_window(backend: str, window: int | None) -> None:
    sequences, pages = made(EDGES)
    q = np.random.default_rng(1).standard_normal((len(EDGES), HEADS, DIM)).astype(np.float32)
    rows = (pages.k, pages.v, pages.table, np.array(EDGES, np.int32))
    got = np.asarray(run("decode", backend, window)(q, *rows))
    for row, sequence in enumerate(sequences):
        want = wanted(q[row : row + 1], sequence, window)[0]
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=2e-5)


@backends
@windows
def test_a_chunk_that_ends_at_every_edge_sees_its_windows(backend: str, window: int | None) -> None:
    sequences, pages = made(EDGES)
    lengths = [min(n, 3) for n in EDGES]
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int32)
    q = np.random.default_rng(2).standard_normal((sum(lengths), HEADS, DIM)).astype(np.float32)
    rows = (pages.table, starts, np.array(lengths, np.int32), np.array(EDGES, np.int32))
    got = np.asarray(run("extend", backend, window)(q, pages.k, pages.v, *rows))
    for start, length, sequence in zip(starts, lengths, sequences, strict=True):
        mine = slice(start, start + length)
        want = wanted(q[mine], sequence, window)
        np.testing.assert_allclose(got[mine], want, rtol=2e-5, atol=2e-5)


@backends
def test_a_prompt_in_chunks_of_any_cut_is_the_prompt_at_once(backend: str) -> None:
    total = 2 * PAGE + 1
    (sequence,), pages = made((total,))
    q = np.random.default_rng(3).standard_normal((total, HEADS, DIM)).astype(np.float32)
    whole = wanted(q, sequence, PAGE)
    attend = run("extend", backend, PAGE)
    for cut in (1, PAGE - 1, PAGE, PAGE + 1, total - 1):
        parts = []
        for begin, end in itertools.pairwise((0, cut, total)):
            padded = np.zeros_like(q)  # of one shape, so that all cuts share a program
            padded[: end - begin] = q[begin:end]
            ints = (np.array([x], np.int32) for x in (0, end - begin, end))
            out = np.asarray(attend(padded, pages.k, pages.v, pages.table, *ints))
            assert not out[end - begin :].any(), "tokens of no row give zeros"
            parts.append(out[: end - begin])
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=2e-5, atol=2e-5)


@backends
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_rows_that_are_not_in_use_give_zeros_over_pages_of_nan(op: str, backend: str) -> None:
    pool = np.full((3, KV_HEADS, PAGE, DIM), np.nan, np.float32)
    q, table = np.ones((2, HEADS, DIM), np.float32), np.zeros((2, 2), np.int32)
    none = np.zeros(2, np.int32)
    rows = (none,) if op == "decode" else (none, none, none)
    out = run(op, backend, None)(q, pool, pool, table, *rows)
    np.testing.assert_array_equal(out, 0)


@backends
@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1])
def test_one_row_of_one_head_is_its_value_when_it_sees_one_token(backend: str, length: int) -> None:
    (sequence,), pages = made((length,))
    q = np.full((1, KV_HEADS, DIM), 9.0, np.float32)
    rows = (pages.k, pages.v, pages.table, np.array([length], np.int32))
    out = np.asarray(run("decode", backend, 1)(q, *rows))
    np.testing.assert_allclose(out[0], sequence[1, -1], rtol=1e-6)


@pytest.mark.parametrize("queries", [1, 16])
def test_parameters_of_items_come_from_the_ops_options(queries: int) -> None:
    found = items.Spec.of(queries, {"scale": 0.5, "window": 7, "softcap": 2.0, "no_split": True})
    assert found == items.Spec(queries=queries, scale=0.5, window=7, softcap=2.0)
    plain = items.Spec.of(queries, {"scale": 0.5})
    assert plain.window is None and plain.softcap is None
    sized = mosaic_tpu.Spec.of(queries, {"scale": 0.5}, heads=2, pages=3, interpret=False)
    assert (sized.queries, sized.heads, sized.pages) == (queries, 2, 3)
    assert len({found, plain, sized}) == 3, "static arguments are hashable"


@pytest.mark.parametrize("op", [paged_decode, paged_extend])
@pytest.mark.parametrize("backend", ["xla", "mosaic_gpu", "mosaic_tpu"])
@pytest.mark.parametrize("heads", [1, 3, 7])
def test_query_heads_that_do_not_divide_are_refused(op: Any, backend: str, heads: int) -> None:
    low = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    pool = low((8, 2, 64, 128))
    with pytest.raises(ValueError, match=backend):
        op.BACKENDS.check(backend, low((5, heads, 128)), pool, pool)
    op.BACKENDS.check(backend, low((5, 2 * heads, 128)), pool, pool)
