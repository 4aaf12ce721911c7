"""The device pages: where they live, what a step writes and reads, that nothing is copied, and that
sharding changes nothing."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache import kv as kv_module
from jaxllm.cache.arrays import DROP_PAGE, PAGES, Zeros, page_bytes
from jaxllm.cache.collective import over
from jaxllm.cache.kv import PagedContext
from jaxllm.cache.layer import PagedKV
from jaxllm.cache.step import PagedInputs
from jaxllm.mesh import LAYER, make_mesh, per_device
from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.layout import dense_attention
from pallas_kernels.rope_write import HeadRows
from tests.by_layer import abstract_kv, by_layer, places

LAYERS, P, K, N, C, H = 2, 24, 8, 16, 16, 32
HEADS = PartitionSpec(None, LAYER, None)  # [T, heads, H]
OPTIONS = {"scale": 0.2, "window": None, "softcap": None}


def tokens(total, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((total, heads, H)).astype(np.float32) for heads in (N, K, K)]


def rows_of(q, k, v):
    """The rows of a fused projection that come out as these heads of one device: no bias, no norm,
    no rotation."""
    qkv = jnp.concatenate([jnp.reshape(x, (len(x), 1, -1, H)) for x in (q, k, v)], axis=2)
    cos, sin = (jnp.full((len(q), H // 2), x, jnp.float32) for x in (1, 0))
    return HeadRows(qkv, cos, sin, bias=None, norms=None, eps=0.0, queries=q.shape[1])


def sharded(mesh, kv, function):
    """`function(kv, inputs, q, k, v, *of_heads)`, which gives heads and pages, on every device."""
    heads, whole = (NamedSharding(mesh, spec) for spec in (HEADS, PartitionSpec()))
    of_heads = NamedSharding(mesh, PartitionSpec(LAYER))
    pages = jax.tree.map(lambda x: x.sharding, kv)

    def run(kv, inputs, q, k, v, *sinks):
        given = pages, whole, heads, heads, heads, *(of_heads for _ in sinks)
        return per_device(function, mesh, given, (heads, pages))(kv, inputs, q, k, v, *sinks)

    return run


def batch(decodes, chunks, table):
    """Inputs of a step: `decodes` are (row of the table, length), `chunks` (row, start, length,
    tokens before it in the sequence)."""
    # Length 0 gives position -1: a dropped token
    places = [(row, length - 1) for row, length in decodes]
    places += [(row, prefix + i) for row, _, length, prefix in chunks for i in range(length)]
    ints = functools.partial(np.array, dtype=np.int32)

    def tables(rows):
        return table[np.array(rows, int)]

    return PagedInputs(
        decode_tables_BM=tables([row for row, _ in decodes]),
        decode_lengths_B=ints([length for _, length in decodes]),
        chunk_tables_RM=tables([row for row, *_ in chunks]),
        chunk_starts_R=ints([start for _, start, *_ in chunks]),
        chunk_lengths_R=ints([length for _, _, length, _ in chunks]),
        chunk_kv_lengths_R=ints([length + prefix for *_, length, prefix in chunks]),
        write_page_T=ints([table[row, j // C] if j >= 0 else DROP_PAGE for row, j in places]),
        write_offset_T=ints([j % C for _, j in places]),
    )


TABLE = np.random.default_rng(7).permutation(P).astype(np.int32).reshape(4, 6)


def step(mesh, kv, inputs, q, k, v):
    """Two layers; the second one's queries come from the first."""

    def own(kv, inputs, q, k, v):
        context = PagedContext(kv, places(LAYERS), [inputs], "reference", over(mesh))
        first = context.attend(0, rows_of(q, k, v), **OPTIONS)
        second = context.attend(1, rows_of(first, k * 2, v * 2), **OPTIONS)
        return second, context.kv

    like = abstract_kv(LAYERS, P, K, C, H, jnp.float32, mesh)
    return sharded(mesh, like, own)(kv, inputs, q, k, v)


def compiled_step(mesh, kv, inputs, arrays):
    return (
        jax.jit(functools.partial(step, mesh), donate_argnums=0)
        .lower(kv, inputs, *arrays)
        .compile()
    )


def empty(mesh):
    return Zeros()(abstract_kv(LAYERS, P, K, C, H, jnp.float32, mesh))


def sequence_through_steps(mesh):
    """Row 0 is prefilled in two chunks beside row 1, then both decode beside a prefill of row 2.
    Returns outputs and tokens.

    Every step is padded to three decode rows, two chunks and 50 chunk tokens, as an engine's bucket
    would be.
    """
    kv, run = empty(mesh), jax.jit(functools.partial(step, mesh))
    plans = [
        ((), ((0, 0, 20, 0), (1, 20, 7, 0))),
        ((), ((0, 0, 13, 20),)),
        (((0, 34), (1, 8)), ((2, 0, 40, 0),)),
        (((0, 35), (1, 9), (2, 41)), ()),
    ]
    out = []
    for i, (decodes, chunks) in enumerate(plans):
        arrays = tokens(53, i)
        padded = batch(
            decodes + ((3, 0),) * (3 - len(decodes)),
            chunks + ((3, 0, 0, 0),) * (2 - len(chunks)),
            TABLE,
        )
        unused = 53 - len(padded.write_page_T)
        padded = dataclasses.replace(
            padded,
            write_page_T=np.pad(padded.write_page_T, (0, unused), constant_values=DROP_PAGE),
            write_offset_T=np.pad(padded.write_offset_T, (0, unused)),
        )
        o, kv = run(kv, padded, *arrays)
        out.append((arrays, np.asarray(o)))
    return out


def test_a_page_counts_keys_and_values_of_every_layer():
    mesh = make_mesh(1)
    made = Zeros()(abstract_kv(3, 5, 4, 16, 32, jnp.bfloat16, mesh))
    assert 3 * page_bytes(PagedKV(4, 32, 32), 1, 16, jnp.bfloat16) * 5 == sum(
        x.nbytes for x in jax.tree.leaves(made)
    )


@pytest.mark.parametrize("shards", [1, 4, 8])
def test_every_device_holds_all_pages_of_its_own_heads(shards):
    mesh = make_mesh(shards)
    kv, like = empty(mesh), abstract_kv(LAYERS, P, K, C, H, jnp.float32, mesh)
    for made, wanted in zip(jax.tree.leaves(kv), jax.tree.leaves(like), strict=True):
        assert (made.shape, made.dtype, made.sharding) == (
            wanted.shape,
            wanted.dtype,
            wanted.sharding,
        )
        assert made.addressable_shards[0].data.shape == (LAYERS * P, K // shards, C, H)
        assert not np.asarray(made).any()


def test_heads_that_do_not_divide_are_refused_with_the_remedy():
    with pytest.raises(
        ValueError,
        match=r"6 KV heads cannot be split over 4 devices; repeat them to a multiple of 4",
    ):
        abstract_kv(LAYERS, P, 6, C, H, jnp.float32, make_mesh(4))


def test_prefill_in_chunks_then_decode_equals_dense_attention():
    (first, o1), (second, o2), (third, o3), (fourth, o4) = sequence_through_steps(make_mesh(1))
    # Where every row's tokens went, in order: decode rows are tokens 0 to 2 of a step, chunk tokens
    # start at 3
    rows = [
        [
            (first, o1, slice(3, 23)),
            (second, o2, slice(3, 16)),
            (third, o3, slice(0, 1)),
            (fourth, o4, slice(0, 1)),
        ],
        [(first, o1, slice(23, 30)), (third, o3, slice(1, 2)), (fourth, o4, slice(1, 2))],
        [(third, o3, slice(3, 43)), (fourth, o4, slice(2, 3))],
    ]
    for parts in rows:
        q, k, v = (np.concatenate([arrays[i][span] for arrays, _, span in parts]) for i in range(3))
        hidden = dense_attention(q, k, v, **OPTIONS)
        wanted = dense_attention(hidden, k * 2, v * 2, **OPTIONS)
        got = np.concatenate([o[span] for _, o, span in parts])
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_decode_rows_and_chunks_together_equal_each_alone_to_the_last_bit():
    mesh, run = make_mesh(1), jax.jit(functools.partial(step, make_mesh(1)))
    filled = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), empty(mesh))
    q, k, v = tokens(2 + 21)
    both, _ = run(filled, batch(((0, 34), (1, 8)), ((2, 0, 21, 0),), TABLE), q, k, v)
    decodes, _ = run(filled, batch(((0, 34), (1, 8)), (), TABLE), q[:2], k[:2], v[:2])
    chunks, _ = run(filled, batch((), ((2, 0, 21, 0),), TABLE), q[2:], k[2:], v[2:])
    np.testing.assert_array_equal(both, np.concatenate([decodes, chunks]))


def test_a_row_that_is_not_alive_writes_nothing_and_reads_zeros():
    mesh = make_mesh(1)
    arrays = tokens(2)
    o, kv = compiled_step(mesh, empty(mesh), batch(((0, 5), (1, 0)), (), TABLE), arrays)(
        empty(mesh), batch(((0, 5), (1, 0)), (), TABLE), *arrays
    )
    assert not np.asarray(o[1]).any()
    assert np.asarray(o[0]).any()
    written = np.argwhere(np.asarray(by_layer(kv)[0]).any(axis=(2, 4)))
    assert written.tolist() == [[layer, TABLE[0, 0], 4] for layer in range(LAYERS)]


@pytest.mark.parametrize("shards", [1, 2])
def test_sinks_follow_their_heads_to_decode_rows_and_chunks(shards):
    mesh, sinks = make_mesh(shards), np.linspace(-2, 4, N, dtype=np.float32)
    how = {**OPTIONS, "window": 12}

    def own(kv, inputs, q, k, v, sinks):
        context = PagedContext(kv, places(LAYERS), [inputs], "reference", over(mesh))
        return context.attend(0, rows_of(q, k, v), **how, sinks=sinks), context.kv

    arrays, run = tokens(31), jax.jit(sharded(mesh, empty(mesh), own))
    chunk, kv = run(
        empty(mesh), batch((), ((0, 0, 30, 0),), TABLE), *(x[:30] for x in arrays), sinks
    )
    decode, _ = run(kv, batch(((0, 31),), (), TABLE), *(x[30:] for x in arrays), sinks)
    wanted = dense_attention(*arrays, **how, sinks=sinks)
    np.testing.assert_allclose(np.concatenate([chunk, decode]), wanted, rtol=1e-4, atol=1e-5)


def test_sharding_over_heads_changes_no_bit():
    alone = sequence_through_steps(make_mesh(1))
    for shards in (2, 8):
        for (_, one), (_, split) in zip(
            alone, sequence_through_steps(make_mesh(shards)), strict=True
        ):
            np.testing.assert_array_equal(split, one)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_donated_pool_is_updated_in_place_and_never_copied(shards):
    mesh, pages = make_mesh(shards), 4096
    kv = abstract_kv(LAYERS, pages, K, C, H, jnp.float32, mesh)
    pool = pages * K * C * H * 4 // shards
    compiled = compiled_step(
        mesh, kv, batch(((0, 34), (1, 8)), ((2, 0, 21, 0),), TABLE), tokens(23)
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * LAYERS * pool
    assert memory.temp_size_in_bytes < pool / 4


def test_the_heads_need_no_communication():
    mesh = make_mesh(4)
    inputs = batch(((0, 34), (1, 8)), ((2, 0, 21, 0),), TABLE)
    heads = NamedSharding(mesh, HEADS)
    arrays = [jax.device_put(x, heads) for x in tokens(23)]
    text = compiled_step(mesh, empty(mesh), inputs, arrays).as_text()
    assert not any(
        word in text for word in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    )


def test_layers_share_one_trace_of_the_kernels(monkeypatch):
    mesh, traces = make_mesh(1), []
    write = kv_module.rope_write.rope_write
    counted = lambda *args, **how: traces.append(1) or write(*args, **how)
    monkeypatch.setattr(kv_module.rope_write, "rope_write", counted)
    arrays = [jax.device_put(x, NamedSharding(mesh, HEADS)) for x in tokens(19)]
    jax.jit(functools.partial(step, mesh)).lower(
        empty(mesh), batch((), ((0, 0, 19, 0),), TABLE), *arrays
    )
    assert len(traces) == 1


def test_a_step_plans_once_for_all_layers_of_a_window(monkeypatch):
    mesh, planned, given = make_mesh(1), [], []

    def plan_decode(lengths_B, **sizes):
        planned.append(sizes)
        return {"twice": lengths_B * 2}

    def plan_extend(starts_R, lengths_R, kv_lengths_R, **sizes):
        planned.append(sizes)
        return kv_lengths_R - lengths_R

    def attention(q, *args, plan, window, **options):
        given.append((window, jax.tree.map(np.shape, plan)))
        return q

    monkeypatch.setattr(paged_decode.BACKENDS, "planner", lambda name: plan_decode)
    monkeypatch.setattr(paged_extend.BACKENDS, "planner", lambda name: plan_extend)
    monkeypatch.setattr(paged_decode, "decode_attention", attention)
    monkeypatch.setattr(paged_extend, "extend_attention", attention)

    def run(kv, inputs, rows):
        context = PagedContext(kv, places(LAYERS), [inputs], "reference")
        for layer in (0, 1, 0, 1):
            context.attend(layer, rows, scale=0.3, window=None if layer else 8)
        return context.kv

    jax.jit(run).trace(
        empty(mesh), batch(((0, 34), (1, 8)), ((2, 0, 21, 0),), TABLE), rows_of(*tokens(23))
    )
    heads = {"heads": N, "kv_heads": K, "head_dim": H}
    sizes = {"itemsize": 4} | heads, {"tokens": 21} | heads
    assert planned == [
        each | {"window": window, "no_split": False} for window in (8, None) for each in sizes
    ]
    assert given[:2] == [(8, {"twice": (2,)}), (8, (1,))]


def test_layers_pass_on_the_buffers_of_their_plans_flags():
    """A kernel writes the flags of its plan: each layer gets what the layer before it left, so that
    nothing is copied between them."""
    kv = abstract_kv(3, P, 2, 64, 64, jnp.bfloat16, make_mesh(1))
    inputs = batch(((0, 34), (1, 8)), ((2, 0, 21, 0),), TABLE)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    qkv = jax.ShapeDtypeStruct((23, 1, 8, 64), jnp.bfloat16)
    rows = HeadRows(qkv, shape((23, 32)), shape((23, 32)), None, None, eps=0.0, queries=4)

    def run(kv, rows):
        context = PagedContext(kv, places(3), [inputs], "mosaic_gpu")
        return [context.attend(layer, rows, **OPTIONS) for layer in range(3)], context.kv

    text = jax.jit(run).trace(kv, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("func private @_write_and_attend") == 1, "all layers share one function"
    calls = [line for line in text.splitlines() if "call @_write_and_attend" in line]
    assert len(calls) == 3
    operands = [re.search(r"\((.*?)\) : \((.*?)\) -> ", line).groups() for line in calls]
    # What a call leaves goes to the next one through a barrier, which keeps the last call's plan
    results = [line.split(":")[0].strip() for line in calls]
    barriers = [
        next(
            line
            for line in text.splitlines()
            if "optimization_barrier" in line and f" {result}#0" in line
        )
        for result in results
    ]
    names = [line.split(":")[0].strip() for line in barriers]
    plan_types = {
        kind for kind in calls[0].split("-> (")[1].rstrip(")").split(", ") if "i32" in kind
    }
    assert len(plan_types) == 4, "rows and splits of decode, items and splits of extend"
    for before, (given, kinds) in zip(names, operands[1:], strict=False):
        plan = [
            name
            for name, kind in zip(given.split(", "), kinds.split(", "), strict=True)
            if kind in plan_types
        ]
        assert len(plan) == 4 and all(name.startswith(f"{before}#") for name in plan)


def test_an_unknown_back_end_is_refused():
    context = PagedContext(
        empty(make_mesh(1)), places(LAYERS), [batch(((0, 5),), (), TABLE)], "cuda"
    )
    with pytest.raises(KeyError, match="no back end 'cuda'"):
        context.attend(0, rows_of(*tokens(1)), **OPTIONS)


def test_the_cache_is_a_pytree_of_two_arrays_for_all_layers():
    kv = empty(make_mesh(1))
    assert len(jax.tree.leaves(kv)) == 2
    (arrays,) = kv
    assert [x.sharding.spec for x in arrays.planes] == [PAGES] * 2
    assert [arrays.first_page(index) for index in range(LAYERS)] == [
        layer * P for layer in range(LAYERS)
    ]
    assert arrays.page_rows(jnp.array([3, P, P + 1])).tolist() == [
        [3, 2 * P, 2 * P + 1],
        [P + 3, 3 * P, 3 * P + 1],
    ]
    assert dataclasses.is_dataclass(arrays)
    with pytest.raises(dataclasses.FrozenInstanceError):
        arrays.planes = ()
