"""The checks for a device pass where all is right and fail where something is wrong."""

from __future__ import annotations

import functools
import json
import sys
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from benchmarks import correct_engine, correct_kernels, correct_model, correctness, soak
from jaxllm.library.outputs import CompletionOutput, Logprob
from pallas_kernels.add_norm.cases import CASES as NORM_CASES
from pallas_kernels.gated_matmul.cases import Case
from pallas_kernels.rope_write.cases import CASES as ROPE_CASES

EAGER = {"enforce_eager": True}


def answer(*positions: tuple[int, float, float]) -> CompletionOutput:
    """Tokens with their log-probability and that of the runner-up."""
    logprobs = [
        {token: Logprob(first), token + 1: Logprob(second)} for token, first, second in positions
    ]
    return CompletionOutput(0, token_ids=[token for token, _, _ in positions], logprobs=logprobs)


def test_the_kernels_that_are_checked_exist():
    assert max(correct_kernels.DECODE) < len(correct_kernels.kernel_cases.DECODE_CHECKS)
    assert max(correct_kernels.EXTEND) < len(correct_kernels.kernel_cases.EXTEND_CHECKS)
    assert correct_kernels.NORM in {case.name for case in NORM_CASES}
    assert set(correct_kernels.ROPE) <= {case.name for case in ROPE_CASES}


@pytest.mark.parametrize(
    "check",
    [
        functools.partial(correct_kernels.check_rope, ROPE_CASES[-1], "reference"),
        functools.partial(correct_kernels.check_narrow_write, ROPE_CASES[-1], "reference"),
        functools.partial(
            correct_kernels.check_narrow_write, ROPE_CASES[-1], "reference", given=(0.1, 0.002)
        ),
        functools.partial(correct_kernels.check_norm, NORM_CASES[1], "reference"),
        functools.partial(
            correct_kernels.check_product,
            Case(name="", tokens=5, outputs=64, inputs=128),
            "reference",
        ),
        functools.partial(correct_kernels.check_allowed, "reference", 2048, 16),
        functools.partial(correct_kernels.check_frequencies, "reference", 10),
    ],
    ids=[
        "rope",
        "rope in 8 bits",
        "rope by given scales",
        "norm",
        "gated product",
        "allowed",
        "frequencies",
    ],
)
def test_the_reference_passes_each_kernels_check(check):
    assert check()["ok"]


def test_a_product_that_loses_a_term_is_found(monkeypatch):
    whole = correct_kernels.products.gated_matmul
    monkeypatch.setattr(
        correct_kernels.products,
        "gated_matmul",
        lambda x, w, **how: whole(x[:, 1:], w[:, 1:], **how),
    )
    assert not correct_kernels.check_product(
        Case(name="", tokens=5, outputs=64, inputs=128), "reference"
    )["ok"]


def test_draws_that_ignore_filters_or_favour_a_token_are_found(monkeypatch):
    monkeypatch.setattr(
        correct_kernels.draws,
        "draw",
        lambda logits, rows, **how: jnp.argmax(logits, axis=1).astype(jnp.int32),
    )
    assert not correct_kernels.check_frequencies("reference", 4)["ok"]
    # The rows whose best token is banned
    assert correct_kernels.check_allowed("reference", 2048, 16)["forbidden"] == 2


def test_answers_may_part_at_a_near_tie_and_nowhere_else():
    start = (5, -0.5, -2.0)
    same = correct_engine.compared(
        [answer(start, (7, -1.0, -3.0))], [answer(start, (7, -1.01, -3.0))]
    )
    assert (same["tokens"], same["logprob_difference_max"], same["ok"]) == (2, 0.01, True)
    tied = correct_engine.compared(
        [answer(start, (7, -1.0, -1.01))], [answer(start, (8, -1.0, -1.01))]
    )
    assert (tied["tokens"], tied["parted_at_near_ties"], tied["ok"]) == (1, 1, True)
    wrong = correct_engine.compared(
        [answer(start, (7, -1.0, -3.0))], [answer(start, (8, -1.0, -3.0))]
    )
    assert (wrong["parted_elsewhere"], wrong["ok"]) == (1, False)
    assert not correct_engine.compared([answer(start)], [answer((5, -0.6, -2.0))])["ok"]
    assert not correct_engine.compared([answer()], [answer()])["ok"]


def test_what_did_not_take_place_is_not_ok():
    assert not correct_engine.took_place({"ok": True}, "preemptions", 0)["ok"]


@pytest.mark.slow
def test_the_demo_model_says_what_the_goldens_say():
    rows = list(correct_engine.demo(("float32",), ("sum", "reverse"), **EAGER))
    assert [(row["equal"], row["of"], row["ok"]) for row in rows] == [(2, 2, True)]


@pytest.mark.slow
def test_a_small_model_keeps_its_invariants():
    rows = list(correct_engine.invariants((64,), **EAGER))
    assert len(rows) == 5 and [row for row in rows if not row["ok"]] == []


@pytest.mark.slow
def test_seeded_requests_repeat():
    assert all(row["ok"] for row in correct_engine.seeds(64, **EAGER))


@pytest.mark.slow
def test_rows_of_all_kinds_in_one_batch_get_what_they_get_alone():
    rows = list(correct_engine.mixed(2, **EAGER))
    assert [(row["equal"], row["fit"], row["ok"]) for row in rows] == [(2, 2, True)] * len(
        correct_engine.MIXED
    )


@pytest.mark.slow
def test_two_back_ends_of_a_model_are_as_near_to_float32_as_each_other():
    alone, ragged = correct_model.model("shape:tiny", "xla")
    assert (alone["positions"], ragged["positions"]) == (64, 191)
    assert (
        0 < alone["error_max"] < 0.05
        and alone["xla_to_float32_max"] < 1.5 * alone["reference_to_float32_max"]
    )


@pytest.mark.slow
def test_programs_of_an_engine_update_the_pool_in_place():
    decode, extend = correctness.memory("shape:tiny")
    assert decode["ok"] and extend["ok"] and extend["alias_mib"] >= extend["pool_mib"] > 0


def test_a_part_that_breaks_is_reported_and_stops_nothing(monkeypatch, tmp_path):
    def broken():
        yield {"check": "one", "ok": True}
        raise RuntimeError("no such kernel")

    out = tmp_path / "out.json"
    monkeypatch.setattr(correctness, "kernels", broken)
    monkeypatch.setattr(correctness, "seeds", lambda: iter([{"check": "two", "ok": True}]))
    monkeypatch.setattr(correctness, "reserve_memory", lambda share: None)
    monkeypatch.setattr(
        sys, "argv", ["correctness", "--parts", "kernels,seeds", "--output-json", str(out)]
    )
    assert correctness.main() == 1
    figures = json.loads(out.read_text())["figures"]
    assert [row.get("ok") for row in figures] == [True, False, None, True, None]
    assert "no such kernel" in figures[1]["error"]


class Said(NamedTuple):
    """What a step says of one request."""

    id: str
    token_ids: list[int]
    finish_reason: str | None = None


class Scripted:
    """An engine whose steps give what was written down."""

    def __init__(self, *steps: list[Said]):
        self.steps = list(steps)

    def step(self) -> list[Said]:
        return self.steps.pop(0)


def watched(
    *steps: list[Said], gaps: list[list[float]] | None = None, tokens: int = 3
) -> soak.Traffic:
    """Traffic in which one request wants 7, 8, 9, after these steps."""
    traffic = soak.Traffic(Scripted(*steps), [[1]], [[7, 8, 9]], gaps)
    traffic.got["a"], traffic.wanted["a"] = [], (0, tokens)
    for _ in steps:
        traffic.step()
    return traffic


def test_a_request_of_a_soak_must_get_its_tokens_to_the_last_one():
    right = watched([Said("a", [7])], [Said("a", [8, 9], "length")])
    assert (right.ended, right.aborted, right.wrong) == (1, 0, [])
    assert watched([Said("a", [7, 5])], [Said("a", [9], "length")]).wrong == ["a"]
    assert watched([Said("a", [7], "length")]).wrong == ["a"], "too few"
    assert watched([Said("a", [7], "error")]).wrong == ["a"]
    left = watched([Said("a", [7], "abort")])
    assert (left.ended, left.aborted, left.wrong) == (1, 1, [])


def test_a_request_of_a_soak_may_leave_its_tokens_at_a_near_tie_alone():
    def parted(gap: float) -> tuple[int, list[str]]:
        traffic = watched([Said("a", [7, 5, 5], "length")], gaps=[[1.0, gap, 1.0]])
        return traffic.parted, traffic.wrong

    assert parted(0.01) == (1, [])
    assert parted(1.0) == (0, ["a"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_soak_swaps_aborts_and_gives_every_token():
    exact, swaps = soak.soak(200, 64, **EAGER)
    assert exact["ok"] and exact["preemptions"] == 0 and exact["parted_at_near_ties"] == 0
    assert swaps["wrong"] == 0 and swaps["preemptions"] > 0
