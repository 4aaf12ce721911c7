"""Every back end of paged decode passes the shared cases; the reference is invariant to the last
bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode, tiles
from pallas_kernels.backends import UnknownBackend
from pallas_kernels.paged_decode.cases import CASES, Case, inputs
from tests.pallas_kernels.covering import covering

attend = jax.jit(
    paged_decode.decode_attention, static_argnames=("backend", "scale", "window", "softcap")
)
RAGGED = (
    Case(name="GQA", lengths=(1, 130, 17, 260, 0, 64), head_dim=16),
    Case(
        name="MQA and a window",
        lengths=(1, 130, 17, 260, 0, 64),
        heads=4,
        kv_heads=1,
        window=100,
        head_dim=32,
    ),
    Case(name="groups of seven", lengths=(5, 130, 0, 64), heads=14, head_dim=128, page_size=64),
)


@pytest.mark.parametrize("case", covering(CASES))
def test_the_reference_gives_what_the_definition_says(case):
    made = inputs(case)
    out = attend(*made.args, backend="reference", **case.options)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, made.expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_lose_only_their_own_rounding(dtype):
    case = Case(name="narrow", lengths=(5, 140, 0, 64))
    made = inputs(case)
    q, k, v = (np.asarray(jnp.asarray(x).astype(dtype)) for x in made.args[:3])
    out = attend(q, k, v, *made.args[3:], backend="reference", **case.options)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), made.expected, atol=0.03)


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: case.name)
def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit(case):
    made = inputs(case)
    q, k, v, table, lengths = made.args
    together = np.asarray(attend(*made.args, backend="reference", **case.options))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = attend(q[one], k, v, table[one], lengths[one], backend="reference", **case.options)
        np.testing.assert_array_equal(alone[0], together[row])


def test_where_the_pages_lie_changes_no_bit():
    case = Case(name="moved", lengths=(130, 40, 7))
    made = inputs(case)
    q, k, v, table, lengths = made.args
    order = np.random.default_rng(1).permutation(len(k))
    moved = np.argsort(order).astype(np.int32)[table]
    here = attend(*made.args, backend="reference", **case.options)
    there = attend(q, k[order], v[order], moved, lengths, backend="reference", **case.options)
    np.testing.assert_array_equal(here, there)


def test_a_wider_table_changes_no_bit():
    case = Case(name="wide", lengths=(130, 40, 7), spare=0)
    made = inputs(case)
    q, k, v, table, lengths = made.args
    # Also: entries outside the pool are harmless
    wide = np.pad(table, ((0, 0), (0, 37)), constant_values=10_000)
    np.testing.assert_array_equal(
        attend(*made.args, backend="reference", **case.options),
        attend(q, k, v, wide, lengths, backend="reference", **case.options),
    )


def test_the_window_counts_the_query_itself():
    case = Case(name="window", lengths=(10,), window=3)
    made = inputs(case)
    _, k, v, table, lengths = made.args
    v = np.zeros_like(v)
    for j in range(10):
        v[table[0, j // 16], :, j % 16] = 10.0**j
    out = attend(
        np.zeros_like(made.q),
        np.zeros_like(k),
        v,
        table,
        lengths,
        backend="reference",
        **case.options,
    )
    # Keys 7, 8, 9 of query 9
    np.testing.assert_allclose(out, (10.0**7 + 10.0**8 + 10.0**9) / 3, rtol=1e-6)


def test_cost_follows_lengths_and_not_the_tables_width(monkeypatch):
    loads = []
    load_tile = tiles.load_tile

    def counted(pages_PKCH, table, tile, pages):
        jax.debug.callback(lambda t: loads.append(int(t)), tile)
        return load_tile(pages_PKCH, table, tile, pages)

    monkeypatch.setattr(tiles, "load_tile", counted)
    case = Case(name="wide", lengths=(3, 200), spare=1000)
    made = inputs(case)
    out = paged_decode.decode_attention(
        *map(jnp.asarray, made.args), backend="reference", **case.options
    )
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert sorted(loads) == [0, 0, 1, 1]  # keys and values of two tiles of 128


def test_an_unknown_back_end_is_named_with_those_that_exist():
    made = inputs(CASES[0])
    with pytest.raises(
        UnknownBackend, match=r"paged_decode has no back end 'cuda'; choose one of: reference"
    ):
        paged_decode.decode_attention(*made.args, backend="cuda", scale=1.0)
    assert "reference" in paged_decode.BACKENDS
    assert "cuda" not in paged_decode.BACKENDS
    assert len(list(paged_decode.BACKENDS)) == len(paged_decode.BACKENDS)
