"""Bias, penalties and masks equal their definitions; whoever asks for nothing keeps every bit."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.intake.logits_options import SERVED
from jaxllm.sampling.bits import remove
from jaxllm.sampling.options import (
    COLUMNS,
    MAX_LOGIT_BIAS,
    PROCESS_COLUMNS,
    SamplingParams,
    default_of,
)
from jaxllm.sampling.process import MOST, LogitsParams, ProcessRows, process, set_slot_params
from pallas_kernels.draw.reference import mask_banned
from tests.sampling.process_oracle import counts_of, expected, rows_of, run, terms_of

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "process.npz"
STOP = 7  # of the golden

V = 100  # not a multiple of 32
S = 4
SIX = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.1},
    {"logit_bias": {3: 5.0, 4: -100.0, 99: 0.25}},
    {"allowed_token_ids": [0, 3, 31, 32, 99]},
    {},
)


def logits_of(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * 3).astype(np.float32)


token_ids = st.integers(0, V - 1)
requests = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.5, 2),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(token_ids, st.floats(-100, 100), max_size=8),
        "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=V),
    },
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    options=st.lists(requests, min_size=S, max_size=S),
    texts=st.lists(
        st.tuples(st.lists(token_ids, min_size=1, max_size=12), st.lists(token_ids, max_size=12)),
        min_size=S,
        max_size=S,
    ),
    order=st.permutations(range(S)),
    seed=st.integers(0, 99),
)
def test_every_row_is_what_its_request_asked_for(
    options: list[dict[str, Any]], texts: Any, order: list[int], seed: int
) -> None:
    params = [SamplingParams(**some) for some in options]
    logits = logits_of(S, seed)
    terms = terms_of([(p, prompt) for p, (prompt, _) in zip(params, texts, strict=True)], V)
    _, found = run(
        logits, rows_of(order, params), counts_of([output for _, output in texts], V), terms
    )
    for row, slot in enumerate(order):
        want = expected(logits[row], params[slot], *texts[slot])
        np.testing.assert_allclose(np.asarray(found)[row], want, rtol=2e-6, atol=2e-5)


def test_rows_that_ask_for_nothing_keep_every_bit_whatever_their_slot_holds() -> None:
    logits = logits_of(S)
    logits[1, :3] = np.nan, np.inf, -0.0
    asked = SamplingParams(
        repetition_penalty=2, presence_penalty=1, logit_bias={1: 9, 2: 9}, allowed_token_ids=[5]
    )
    terms = terms_of([(asked, [1, 2, 3])] * S, V)
    _, found = run(
        logits,
        rows_of(range(S), [asked] * S, asks=[True, False, True, False]),
        counts_of([[1, 2]] * S, V),
        terms,
    )
    for row in (1, 3):
        np.testing.assert_array_equal(
            np.asarray(found)[row].view(np.uint32), logits[row].view(np.uint32)
        )
    assert np.isfinite(np.asarray(found)[[0, 2]]).sum() == 2


def test_neutral_values_change_no_bit() -> None:
    logits = logits_of(S)
    _, found = run(
        logits,
        rows_of(range(S), [SamplingParams()] * S),
        counts_of([[1, 2, 2]] * S, V),
        terms_of([(SamplingParams(), [1, 7])] * S, V),
    )
    np.testing.assert_array_equal(found, logits)


def test_the_token_drawn_counts_from_the_next_call_and_only_where_one_was_drawn() -> None:
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5)
    logits, terms = np.zeros((S, V), np.float32), terms_of([(params, [1])] * S, V)
    counts = jnp.array(counts_of([[7], [7], [], []], V))
    counts, found = run(
        logits,
        rows_of([2, 0, S, 1], [params] * S, drew=[True, True, False, False], token=[5, 7, 9, 8]),
        counts,
        terms,
    )
    assert (
        np.asarray(found)[0, 5] == -1.5
        and np.asarray(found)[1, 7] == -2.5
        and np.asarray(found)[3, 7] == -1.5
    )
    assert np.argwhere(np.asarray(counts)).tolist() == [[0, 7], [1, 7], [2, 5]]
    assert counts[0, 7] == 2


def test_every_option_with_a_column_that_no_draw_reads_is_a_row_of_process() -> None:
    fields = {field.name for field in dataclasses.fields(ProcessRows)}
    others = {"slot_Q", "active_Q", "drew_Q", "token_Q", "position_Q", "prompt_length_Q"}
    assert {f"{name}_Q" for name in PROCESS_COLUMNS} == fields - others
    assert set(PROCESS_COLUMNS) <= set(SERVED), "a request with such an option is processed"
    assert {name: COLUMNS[name].encode(default_of(name)) for name in PROCESS_COLUMNS} == {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


def test_it_is_one_pass_that_writes_in_place() -> None:
    rows, vocab = 8, 2**15
    logits, counts = (
        jax.ShapeDtypeStruct((rows, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows + 1, vocab), jnp.uint16),
    )
    into = jax.jit(
        lambda logits, rows, counts, terms, reused: process(logits, rows, counts, terms),
        donate_argnums=(2, 4),
        keep_unused=True,
    )
    compiled = into.lower(
        logits,
        rows_of(range(rows), [SamplingParams()] * rows),
        counts,
        LogitsParams.shapes(rows, vocab),
        logits,
    ).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == (rows * 4 + (rows + 1) * 2) * vocab
    assert memory.temp_size_in_bytes < rows * 4 * vocab / 2, "no second matrix of logits"


def test_counts_do_not_wrap() -> None:
    counts = np.zeros((S + 1, V), np.uint16)
    counts[0, 5], counts[1, 5] = MOST, MOST - 1
    terms = terms_of([(SamplingParams(), [1])] * S, V)
    for _ in range(3):
        counts, _ = run(
            np.zeros((2, V), np.float32),
            rows_of([0, 1], [SamplingParams()] * S, drew=True, token=5),
            counts,
            terms,
        )
        assert np.asarray(counts)[:2, 5].tolist() == [MOST, MOST]


def test_as_many_biases_as_a_request_may_have_are_all_added() -> None:
    vocab = 3 * MAX_LOGIT_BIAS
    biases = {token: token / 100 for token in range(0, vocab, 3)}
    params = SamplingParams(logit_bias={token: bias - 10 for token, bias in biases.items()})
    logits = np.zeros((1, vocab), np.float32)
    _, found = run(
        logits, rows_of([0], [params]), counts_of([[]], vocab), terms_of([(params, [1])], vocab)
    )
    np.testing.assert_allclose(
        np.asarray(found)[0], expected(logits[0], params, [1], []), atol=1e-5
    )


def test_a_seat_is_the_requests_own_whoever_sat_there_and_takes_outputs_in_parts() -> None:
    old, new = (
        SamplingParams(repetition_penalty=2, logit_bias={1: 9}, allowed_token_ids=[5]),
        SamplingParams(presence_penalty=1.5),
    )
    terms, counts = terms_of([(old, [1, 2, 3])] * S, V), jnp.array(counts_of([[8] * 9] * S, V))
    mine = terms_of([(new, [4, 5])], V)
    row = {name: value[0] for name, value in vars(mine).items()} | {"slot": jnp.array([2])}
    for first, said in ((1, [7, 7, V]), (0, [7, 9, V])):
        counts, terms = jax.jit(set_slot_params)(
            counts, terms, row | {"first": jnp.array([first]), "said": jnp.array(said)}
        )
    assert {t: int(n) for t, n in enumerate(np.asarray(counts)[2]) if n} == {7: 3, 9: 1}
    for name, value in vars(terms).items():
        np.testing.assert_array_equal(value[2], getattr(mine, name)[0])
        np.testing.assert_array_equal(value[1], getattr(terms_of([(old, [1, 2, 3])], V), name)[0])
    assert (np.asarray(counts)[[0, 1, 3]].sum(axis=1) == 9).all()


def test_logits_are_those_of_transformers() -> None:
    """What `process`, the suppression of stop ids and the temperature make of logits, against
    transformers' processors in its order."""
    golden = np.load(GOLDEN)
    count = sum(name.startswith("logits_") for name in golden.files)
    used = set[str]()
    for case in range(count):
        logits, prompt, output = (
            golden[f"{name}_{case}"] for name in ("logits", "prompt", "output")
        )
        options: dict[str, Any] = json.loads(str(golden[f"options_{case}"]))
        used |= options.keys()
        banned, stop = options.pop("banned", []), len(output) < options.pop("min_tokens", 0)
        params = SamplingParams(**options)
        vocab = len(logits)
        terms = terms_of([(params, prompt.tolist())], vocab)
        for token in banned:
            remove(np.asarray(terms.allowed)[0], token)
        _, found = run(
            logits[None], rows_of([0], [params]), counts_of([output.tolist()], vocab), terms
        )
        found = np.asarray(mask_banned(found, jnp.array([[STOP if stop else -1]])))[0] / np.float32(
            params.temperature
        )
        np.testing.assert_allclose(found, golden[f"found_{case}"], rtol=1e-6, atol=1e-6)
    assert count == 48
    assert len(used) == 6


@pytest.mark.parametrize("options", SIX, ids=str)
def test_the_oracle_tells_the_options_apart(options: dict[str, Any]) -> None:
    logits = logits_of(1)[0]
    changed = (expected(logits, SamplingParams(**options), [3, 8], [8, 8, 31]) != logits).any()
    assert changed == bool(options)
