"""Filters equal the definition, draws depend on nothing but their own row, log-probabilities are
exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.sampling.choose import Sampler
from jaxllm.sampling.options import DRAW_COLUMNS, SamplingParams
from jaxllm.sampling.sample import BROKEN, DrawRows
from pallas_kernels.draw.reference import apply_filters
from tests.sampling.oracle import kept, make_rows, run, softmax

V = 40
INF = np.inf
mask_of = jax.jit(
    lambda logits, rows: jnp.isfinite(apply_filters(logits / rows.temperature_B[:, None], rows))
)
logits_of_a_row = st.one_of(
    hnp.arrays(np.float32, V, elements=st.floats(-30, 30, width=16)),
    hnp.arrays(np.float32, V, elements=st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0])),  # mostly ties
)


def some_logits(rows: int, vocabulary: int = V, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * spread).astype(
        np.float32
    )


def clear_of_edges(logits, temperature, top_k, top_p, min_p) -> bool:
    """Whether float32 and float64 must agree on every token."""
    probs = softmax(np.float64(logits) / temperature)
    ratios = probs / probs.max()
    if min_p > 0 and (np.abs(ratios / min_p - 1) < 1e-4).any():
        return False
    left = probs * kept(logits, temperature, top_k, 1.0, min_p)
    sums = np.array([left[left >= p].sum() for p in left]) / left.sum()
    return bool((np.abs(sums - top_p) > 1e-5).all()) or top_p == 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    logits=logits_of_a_row,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, V - 1, V, V + 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
)
def test_the_tokens_kept_are_those_of_the_definition(logits, temperature, top_k, top_p, min_p):
    if min_p == 1.0:
        assume((np.sort(logits)[-1] - logits[logits < logits.max()] > 1e-3).all())
    else:
        assume(clear_of_edges(logits, temperature, top_k, top_p, min_p))
    rows = make_rows(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    np.testing.assert_array_equal(
        mask_of(logits[None], rows)[0], kept(logits, temperature, top_k, top_p, min_p)
    )


def test_top_k_is_exact_over_the_whole_range_of_floats():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (8, 4096), dtype=np.uint32).view(np.float32)
    logits = np.where(np.isfinite(bits) & (np.abs(bits) > 1e-30), bits, -INF).astype(np.float32)
    top_k = np.array([1, 2, 3, 17, 100, 1000, 1500, 1900])
    got = np.asarray(mask_of(logits, make_rows(8, top_k=top_k)))
    for row in range(8):
        threshold = np.sort(logits[row])[::-1][top_k[row] - 1]
        np.testing.assert_array_equal(got[row], (logits[row] >= threshold) & (logits[row] > -INF))


def test_top_p_holds_with_a_large_vocabulary_and_a_long_tail():
    logits = some_logits(2, 150_000, spread=1.0)
    logits[1, 7] = 12.0  # one likely token above a tail that holds as much again
    for row, top_p in ((0, 0.9), (1, 0.8)):
        probs = softmax(logits[row])
        got = np.asarray(mask_of(logits[row : row + 1], make_rows(1, top_p=top_p)))[0]
        assert probs[got].sum() >= top_p - 1e-4
        assert probs[got].sum() - probs[got].min() < top_p + 1e-4
        assert probs[got].min() > probs[~got].max()


def test_the_padding_of_stop_ids_suppresses_no_token():
    logits = some_logits(8)
    logits[:, -1] = 50  # the token that -1 would wrap around to
    rows = make_rows(8, stop_ids=(-1, 3, -1), suppress=True)
    np.testing.assert_array_equal(run(logits, rows, Sampler.FILTERED), V - 1)


def test_at_least_the_most_likely_token_is_always_kept():
    rows = make_rows(
        8, top_p=[1e-9, 1, 1, 1e-9] * 2, min_p=[0, 1, 0, 1] * 2, top_k=[0, 0, 1, 1] * 2
    )
    logits = some_logits(8)
    np.testing.assert_array_equal(mask_of(logits, rows).argmax(axis=1), logits.argmax(axis=1))
    np.testing.assert_array_equal(mask_of(logits, rows).sum(axis=1), 1)


@pytest.mark.parametrize("sampler", Sampler)
def test_temperature_zero_takes_the_most_likely_token_whatever_the_filters(sampler):
    logits = some_logits(8)
    rows = make_rows(
        8,
        temperature=[0, 0, 1e-6, 0, 0, 0, 9e-6, 0],
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        seed=np.arange(8),
    )
    np.testing.assert_array_equal(run(logits, rows, sampler), logits.argmax(axis=1))


def test_of_equal_logits_greedy_takes_the_first():
    assert run(np.array([[0, 5, 1, 5]], np.float32), make_rows(1), Sampler.GREEDY).tolist() == [1]


def test_samplers_that_do_more_draw_the_same_where_nothing_more_is_asked():
    for position in range(8):
        logits, rows = (
            some_logits(8, seed=position),
            make_rows(8, seed=np.arange(8), temperature=0.9, position=position),
        )
        drawn = [run(logits, rows, s) for s in (Sampler.RANDOM, Sampler.FILTERED)]
        np.testing.assert_array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize("sampler", [Sampler.RANDOM, Sampler.FILTERED])
def test_a_draw_depends_on_its_own_row_alone(sampler):
    logits, n = some_logits(24, 1000), 24
    options = {
        "seed": np.arange(n) * 977,
        "position": np.arange(n) % 5,
        "temperature": 0.5 + np.arange(n) / n,
    }
    options |= {
        "top_p": np.linspace(0.3, 1, n),
        "top_k": np.arange(n) * 7,
        "min_p": np.arange(n) / 300,
    }
    rows = make_rows(n, **options)
    together = np.asarray(run(logits, rows, sampler))
    for some in (np.array([3]), np.array([23]), np.random.default_rng(0).permutation(n)):
        np.testing.assert_array_equal(
            run(logits[some], jax.tree.map(lambda x, i=some: x[i], rows), sampler), together[some]
        )


def test_the_tokens_kept_depend_on_no_neighbour():
    logits = some_logits(16, 5000, spread=1.0)
    rows = make_rows(16, top_p=np.linspace(0.05, 0.95, 16))
    together = np.asarray(mask_of(logits, rows))
    for row in range(16):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(
            mask_of(logits[one], jax.tree.map(lambda x, i=one: x[i], rows))[0], together[row]
        )


def test_seeds_that_differ_in_either_half_draw_differently():
    logits = np.zeros((4, 100_000), np.float32)
    tokens = run(logits, make_rows(4, seed=[0, 2**32, 1, -1]), Sampler.RANDOM).tolist()
    assert len(set(tokens)) == 4
    again = run(logits, make_rows(4, seed=[0, 2**32, 1, -1]), Sampler.RANDOM).tolist()
    assert tokens == again
    assert (
        run(logits, make_rows(4, seed=0, position=[0, 1, 2, 3]), Sampler.RANDOM).tolist()[0]
        == tokens[0]
    )


def test_stop_tokens_are_impossible_only_in_rows_that_suppress_them():
    logits = np.zeros((4, 8), np.float32)
    logits[:, 5], logits[:, 0] = 50, 49
    rows = make_rows(
        4, stop_ids=(5, -1, 0, -1), suppress=[True, False, True, False], temperature=[0, 0, 1, 1]
    )
    tokens = np.asarray(run(logits, rows, Sampler.FILTERED))
    assert tokens[1] == tokens[3] == 5
    assert not {0, 5} & {tokens[0], tokens[2]}


@pytest.mark.parametrize("sampler", Sampler)
def test_a_row_without_a_finite_maximum_is_reported_and_disturbs_nobody(sampler):
    logits = some_logits(8)
    logits[0], logits[1], logits[2, 3], logits[3, 0] = np.nan, -INF, np.nan, INF
    logits[4, :-1] = -INF  # one token left is enough
    rows = make_rows(8, temperature=[1, 0, 1, 1, 1, 0, 0, 0], top_p=0.9)
    tokens = run(logits, rows, sampler).tolist()
    assert tokens == [BROKEN] * 4 + [V - 1] + logits[5:].argmax(axis=1).tolist()


def test_bfloat16_logits_are_sampled_in_float32():
    logits = jnp.asarray(some_logits(8), jnp.bfloat16)
    rows = make_rows(8, seed=np.arange(8), top_p=0.9)
    np.testing.assert_array_equal(
        run(logits, rows, Sampler.FILTERED), run(logits.astype(jnp.float32), rows, Sampler.FILTERED)
    )


def test_a_vocabulary_split_over_devices_gives_the_same_tokens():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "tensor"))
    logits = some_logits(8, 512)
    options = {
        "seed": np.arange(8),
        "top_p": np.linspace(0.2, 1, 8),
        "top_k": 30,
        "temperature": [0, *[1] * 7],
    }
    rows = make_rows(8, stop_ids=(3, int(logits[0].argmax())), suppress=True, **options)
    split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    np.testing.assert_array_equal(
        run(logits, rows, Sampler.FILTERED), run(split, rows, Sampler.FILTERED)
    )


def test_every_draw_option_has_a_column_that_the_kernels_read():
    fields = {field.name for field in dataclasses.fields(DrawRows)}
    assert {f"{name}_B" for name in DRAW_COLUMNS} == fields - {"key_B2", "banned_BK"}
    neutral = SamplingParams()
    assert {
        name: column.encode(getattr(neutral, name)) for name, column in DRAW_COLUMNS.items()
    } == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    extreme = SamplingParams(temperature=1e-6, top_k=-1, top_p=1e-30)
    encoded = {name: column.encode(getattr(extreme, name)) for name, column in DRAW_COLUMNS.items()}
    assert encoded["temperature"] == encoded["top_k"] == 0
    assert np.float32(encoded["top_p"]) > np.finfo(np.float32).tiny, (
        "programs flush what is smaller"
    )
