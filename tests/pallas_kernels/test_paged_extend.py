"""Every back end of paged extend passes the shared cases; the reference is invariant to the last
bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_extend
from pallas_kernels.backends import UnknownBackend
from pallas_kernels.paged_extend import reference
from pallas_kernels.paged_extend.cases import CASES, Case, inputs
from tests.pallas_kernels.covering import covering

attend = jax.jit(
    paged_extend.extend_attention, static_argnames=("backend", "scale", "window", "softcap")
)


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("case", covering(CASES))
def test_the_reference_gives_what_the_definition_says(case):
    made = inputs(case)
    out = attend(*made.args, backend="reference", **case.options)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, made.expected, rtol=2e-5, atol=2e-6)


def test_narrow_types_lose_only_their_own_rounding():
    case = Case(name="narrow", rows=((0, 40), (120, 12)))
    made = inputs(case)
    q, k, v = (np.asarray(jnp.asarray(x).astype(jnp.bfloat16)) for x in made.args[:3])
    out = attend(q, k, v, *made.args[3:], backend="reference", **case.options)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), made.expected, atol=0.03)


def alone(made, row, first, last, options):
    """The output of the queries [first, last) of one row's chunk, run as the only chunk of a step
    padded to the batch's size."""
    q, k, v, table, starts, lengths, kv_lengths = made.args
    start, kv_length = starts[row] + first, kv_lengths[row] - lengths[row] + last
    padded = np.full_like(q, np.nan)
    padded[3 : 3 + last - first] = q[start : start + last - first]
    rows = (table[row : row + 1], ints(3), ints(last - first), ints(kv_length))
    return np.asarray(attend(padded, k, v, *rows, backend="reference", **options))[
        3 : 3 + last - first
    ]


@pytest.mark.parametrize("window", [None, 50])
def test_a_chunked_prompt_equals_the_whole_prompt_to_the_last_bit(window):
    case = Case(name="whole", rows=((0, 150),), gap=3, window=window, head_dim=32)
    made = inputs(case)
    whole = np.asarray(attend(*made.args, backend="reference", **case.options))[3:153]
    for cuts in ((0, 64, 150), (0, 1, 150), (0, 33, 77, 131, 149, 150), (0, 149, 150)):
        for first, last in itertools.pairwise(cuts):
            np.testing.assert_array_equal(
                alone(made, 0, first, last, case.options), whole[first:last]
            )


def test_padding_changes_no_bit():
    case, padded = (Case(name="padding", rows=((0, 150),), gap=gap, head_dim=32) for gap in (0, 3))
    there = attend(*inputs(padded).args, backend="reference", **case.options)
    np.testing.assert_array_equal(
        attend(*inputs(case).args, backend="reference", **case.options), there[3:153]
    )


def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit():
    case = Case(name="batch", rows=((40, 50), (0, 0), (0, 33), (7, 1)), gap=5, heads=6, head_dim=32)
    made = inputs(case)
    together = np.asarray(attend(*made.args, backend="reference", **case.options))
    for row, (start, length) in enumerate(zip(made.starts, made.lengths, strict=True)):
        np.testing.assert_array_equal(
            alone(made, row, 0, length, case.options), together[start : start + length]
        )


def test_where_the_pages_lie_and_how_wide_the_table_is_change_no_bit():
    case = Case(name="moved", rows=((40, 50), (0, 33)), spare=0)
    made = inputs(case)
    q, k, v, table, *rows = made.args
    order = np.random.default_rng(1).permutation(len(k))
    moved = np.pad(
        np.argsort(order).astype(np.int32)[table], ((0, 0), (0, 21)), constant_values=10_000
    )
    here = attend(*made.args, backend="reference", **case.options)
    there = attend(q, k[order], v[order], moved, *rows, backend="reference", **case.options)
    np.testing.assert_array_equal(here, there)


def test_a_token_sees_nothing_that_comes_after_it():
    case = Case(name="causal", rows=((20, 60),))
    made = inputs(case)
    q, k, v, table, *rows = made.args
    before = np.asarray(attend(*made.args, backend="reference", **case.options))
    changed = [x.copy() for x in (k, v)]
    for x in changed:
        for j in range(50, 80):
            x[table[0, j // 16], :, j % 16] += 1.0
    after = np.asarray(attend(q, *changed, table, *rows, backend="reference", **case.options))
    np.testing.assert_array_equal(before[:30], after[:30])
    assert (before[30:] != after[30:]).any(axis=(1, 2)).all()


def test_only_the_query_tiles_in_use_run():
    case = Case(name="few", rows=((0, 33), (31, 2), (0, 0), (64, 32)))
    made = inputs(case)
    text = str(
        jax.make_jaxpr(lambda *args: reference.extend_attention(*args, **case.options))(*made.args)
    )
    assert text.count("while[") >= 1  # the trip count is traced, not static
    first = made.kv_lengths - made.lengths
    assert reference.query_tiles(first, made.kv_lengths).tolist() == [2, 2, 0, 1]


def test_an_unknown_back_end_is_named_with_those_that_exist():
    made = inputs(CASES[0])
    with pytest.raises(
        UnknownBackend, match=r"paged_extend has no back end 'cuda'; choose one of: reference"
    ):
        paged_extend.extend_attention(*made.args, backend="cuda", scale=1.0)
