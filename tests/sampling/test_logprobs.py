"""The largest numbers, log-probabilities and ranks against a sort and float64; what tokens are
drawn by against the definition."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.logprobs import StepLogprobs, first_rows, packed_from, total, unpacked, widths
from jaxllm.messages import TokenLogprobs
from jaxllm.sampling.logprobs import MOST, largest, packed_logprobs, processed
from tests.sampling.oracle import kept, make_rows, softmax

SIZES = (1, 104, 641, 2048, 4097, 32_000)
KINDS = ("normal", "ties", "equal", "mostly impossible", "rising", "falling")
ROWS = 3
largest_of = jax.jit(largest, static_argnums=1)
pack = jax.jit(packed_logprobs, static_argnums=(2, 3))
processed_of = jax.jit(processed)


@functools.cache
def numbers(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((ROWS, size)) * 4
    if kind == "ties":
        x = np.round(x)  # -0 and 0 among them
    elif kind == "equal":
        x[:] = 1.5
    elif kind == "mostly impossible":
        x = np.where(rng.random(x.shape) < 0.99, -np.inf, x)
        x[:, size // 2] = 2.0
    elif kind in ("rising", "falling"):
        x = np.sort(x, axis=1)[:, :: 1 if kind == "rising" else -1]
    return x.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 20, MOST, MOST + 6])
def test_the_largest_are_those_of_a_stable_sort(count: int, size: int) -> None:
    count = min(count, size)
    for kind in KINDS:
        x = numbers(kind, size)
        values, places = largest_of(x, count)
        order = np.argsort(-x, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(places, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=1))
        assert places.dtype == jnp.int32


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 30, 3000]), st.sampled_from([1.0, 50.0]))
def test_equal_numbers_come_in_their_order_wherever_they_are(
    seed: int, different: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.choice(rng.standard_normal(different) * spread, (ROWS, 4097))).astype(np.float32)
    np.testing.assert_array_equal(
        largest_of(x, 20)[1], np.argsort(-x, axis=1, kind="stable")[:, :20]
    )


@pytest.mark.parametrize("size", [40, 2048, 32_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "mostly impossible"])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_log_probabilities_and_ranks_are_exact(kind: str, size: int, offset: float) -> None:
    logits = (numbers(kind, size) + np.float32(offset)).astype(np.float32)
    tokens = np.array([int(logits[0].argmax()), size - 1, size // 2])
    found = StepLogprobs(np.asarray(pack(logits, tokens, 20, True)))
    for row, token in enumerate(tokens):
        with np.errstate(divide="ignore"):
            exact = np.log(softmax(logits[row]))
        (one,) = unpacked(found.row(row, 20), [int(token)])
        order = np.argsort(-logits[row], kind="stable")[:20]
        assert one.rank == 1 + (logits[row] > logits[row, token]).sum()
        assert [id for id, _ in one.top] == order.tolist()
        np.testing.assert_allclose(
            [one.logprob, *(value for _, value in one.top)],
            exact[[token, *order]],
            atol=4e-6,
            rtol=1e-6,
        )
        if token in order:  # clients compare the two for equality
            assert one.logprob == dict(one.top)[token]


def test_logits_themselves_can_take_the_place_of_log_probabilities() -> None:
    logits = numbers("normal", 2048)
    found = StepLogprobs(np.asarray(pack(logits, np.array([5, 6, 7]), 4, False)))
    entries = unpacked(b"".join(found.row(row, 3) for row in range(ROWS)), [5, 6, 7])
    assert [entry.logprob for entry in entries] == [
        float(logits[row, 5 + row]) for row in range(ROWS)
    ]
    assert [[value for _, value in entry.top] for entry in entries] == [
        sorted(row.tolist(), reverse=True)[:3] for row in logits
    ]


def test_no_sort_of_the_vocabulary_is_compiled() -> None:
    shapes = jax.ShapeDtypeStruct((8, 152_064), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    text = pack.trace(*shapes, 20, True).lower(lowering_platforms=("cuda",)).as_text()
    assert not {"stablehlo.sort", "chlo.top_k", "stablehlo.custom_call"} & set(
        text.replace("(", " ").replace('"', " ").split()
    )


@pytest.mark.parametrize("count", [0, 1])
def test_none_of_the_most_likely_tokens_may_be_wanted(count: int) -> None:
    logits = numbers("normal", 104)
    packed = pack(logits, np.array([1, 2, 3]), count, True)
    assert packed.shape == (ROWS, 2 + 2 * count)
    (one,) = unpacked(StepLogprobs(np.asarray(packed)).row(1, 0), [2])
    assert (one.token_id, one.top) == (2, [])
    np.testing.assert_allclose(one.logprob, np.log(softmax(logits[1]))[2], atol=2e-6)


def test_a_row_that_is_broken_disturbs_nobody() -> None:
    logits = numbers("normal", 2048).copy()
    whole = np.asarray(pack(logits, np.array([1, 2, 3]), 5, True))
    logits[0], logits[2, 7] = np.nan, np.nan
    np.testing.assert_array_equal(
        np.asarray(pack(logits, np.array([-2, 2, -2]), 5, True))[1], whole[1]
    )


numbers32 = st.floats(width=32, allow_nan=False)
ids = st.integers(0, 2**31 - 1)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 5), st.integers(0, 4), st.integers(0, 3))
def test_what_is_packed_is_unpacked_with_as_many_of_the_likeliest_as_wanted(
    data: st.DataObject, width: int, tokens: int, more: int
) -> None:
    top = st.lists(st.tuples(ids, numbers32), min_size=width + more, max_size=width + more)
    made = st.builds(TokenLogprobs, token_id=ids, logprob=numbers32, rank=ids, top=top)
    entries = data.draw(st.lists(made, min_size=tokens, max_size=tokens))
    said = [entry.token_id for entry in entries]
    expected = [replace(entry, top=entry.top[:width]) for entry in entries]
    assert unpacked(packed_from(entries, width), said) == expected
    rows = np.frombuffer(packed_from(entries, width + more), np.int32).reshape(
        tokens, 2 + 2 * (width + more)
    )
    step = StepLogprobs(rows)
    assert [unpacked(step.row(row, width), said[row : row + 1]) for row in range(tokens)] == [
        [entry] for entry in expected
    ]
    assert [step.top(row, width) for row in range(tokens)] == [entry.top for entry in expected]


def test_a_row_of_several_tokens_gives_the_bytes_of_as_many_as_it_has() -> None:
    rows = np.arange(3 * 2 * 6, dtype=np.int32).reshape(3, 2, 6)
    step = StepLogprobs(rows)
    one_by_one = StepLogprobs(rows.reshape(6, 6))
    for row in range(3):
        first, second = (one_by_one.row(2 * row + place, 1) for place in range(2))
        assert step.row(row, 1, 1) == first
        assert step.row(row, 1, 2) == first + second
        assert first_rows(step.row(row, 1, 2), 1, 2) == first
    assert first_rows(None, 1, 2) is None


def test_the_sum_is_that_of_the_chosen_tokens_rounded_once() -> None:
    values = [float(value) for value in np.array([-1e8, -1.25, 1e8, -2e-5, -3.5], np.float32)]
    entries = [
        TokenLogprobs(token_id=1, logprob=value, rank=1, top=[(2, -7.0)]) for value in values
    ]
    assert total(packed_from(entries, 1), 5) == math.fsum(values)
    assert total(b"", 0) == 0.0


def test_few_widths_serve_every_request() -> None:
    assert [widths(most) for most in (0, 1, 20, 21, 5000)] == [
        (0,),
        (1,),
        (20,),
        (20, 21),
        (20, 5000),
    ]


def test_a_vocabulary_split_over_devices_gives_the_same_log_probabilities() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "tensor"))
    for size in (512, 2048):
        logits, tokens = numbers("ties", size), np.array([0, 300, 511])
        split = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
        here, there = (np.asarray(pack(x, tokens, 20, True)) for x in (logits, split))
        np.testing.assert_array_equal(here[:, 1:22], there[:, 1:22])
        np.testing.assert_allclose(
            here[:, 22:].view(np.float32), there[:, 22:].view(np.float32), atol=2e-6
        )
        np.testing.assert_allclose(
            here[:, :1].view(np.float32), there[:, :1].view(np.float32), atol=2e-6
        )


def test_what_tokens_are_drawn_by_is_the_distribution_of_the_draw() -> None:
    logits = numbers("normal", 40)
    options = {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    rows = make_rows(ROWS, stop_ids=(-1, 3), suppress=[False, True, False], **options)
    rows = jax.tree.map(np.array, rows)
    rows.temperature_B[2] = 0  # the most likely token: nothing is filtered or divided
    found = np.asarray(processed_of(logits, rows), np.float64)
    np.testing.assert_array_equal(found[2], logits[2])
    for row in (0, 1):
        mine = logits[row].astype(np.float64)
        mine[3] = -np.inf if row == 1 else mine[3]
        expected = np.where(kept(mine, **options), mine / 0.5, -np.inf)
        np.testing.assert_allclose(found[row], expected, rtol=1e-6)
