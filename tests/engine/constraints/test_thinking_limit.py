"""Reasoning ends at its budget: the marker's tokens are forced, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxllm.engine.constraints.thinking_limit import MAX_START, ThinkingLimit
from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.messages import RequestError, ThinkingBudget
from jaxllm.sampling.bits import everything, packed
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import Numbers
from tests.server.fake import RESOLVED

VOCABULARY = [chr(at) for at in range(128)] + ["<think>", "</think>", "</th", "ink>", "é"]
START, END = 128, 129


def decode(ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[id] for id in ids)


def limit(budget: int, begun: bool = True, end_ids: Sequence[int] = (END,)) -> ThinkingLimit:
    starts, ends = ("<think>", "<thought>"), ("</think>", "</thought>", "[CALL]")
    return ThinkingLimit(budget, begun, starts, ends, end_ids, decode)


def allowed(constraint: ThinkingLimit) -> set[int]:
    """The tokens that may come next, out of all."""
    bits_W = everything(len(VOCABULARY))
    constraint.apply_mask(bits_W)
    return {id for id in range(len(VOCABULARY)) if int(bits_W[id // 32]) >> id % 32 & 1}


ALL = set(range(len(VOCABULARY)))


def followed(constraint: ThinkingLimit, text: Sequence[int]) -> list[set[int]]:
    """The allowed tokens before each of these, which must be allowed, and after the last."""
    masks = [allowed(constraint)]
    for token in text:
        assert token in masks[-1]
        constraint.accept_tokens([token])
        masks.append(allowed(constraint))
    return masks


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_after_the_budget_only_the_end_marker_may_come(budget: int) -> None:
    masks = followed(limit(budget), [*b"abcde"[:budget], END, *b"</"])
    assert masks == [ALL] * budget + [{END}] + [ALL] * 3


def test_a_marker_of_several_tokens_is_forced_token_by_token() -> None:
    masks = followed(limit(2, end_ids=[130, 131]), [*b"ab", 130, 131, *b"c"])
    assert masks == [ALL, ALL, {130}, {131}, ALL, ALL]


@pytest.mark.parametrize(
    "end", [[END], [130, 131], *map(list, (b"</think>", b"a.</think> b", b"</thought>", b"[CALL]"))]
)
def test_thought_that_ends_by_itself_is_over_in_any_tokens(end: list[int]) -> None:
    assert followed(limit(20), [*b"so", *end, *[97] * 40]) == [ALL] * (43 + len(end))


@pytest.mark.parametrize("start", [[START], [10, START], [*b"<think>"], [*b"\n<thought>"]])
def test_a_thought_that_the_model_begins_is_limited_too(start: list[int]) -> None:
    masks = followed(limit(1, begun=False), [*start, *b"a", END, *b"b"])
    assert masks == [ALL] * (len(start) + 1) + [{END}, ALL, ALL]


@pytest.mark.parametrize(
    "text", [b"Hello <think>", b"<thing><think>", b"\n" * MAX_START + b"<think>"]
)
def test_what_begins_otherwise_is_no_thought(text: bytes) -> None:
    assert followed(limit(0, begun=False), [*text, *b"abc"]) == [ALL] * (len(text) + 4)


def test_the_marker_cannot_come_where_it_was_forbidden() -> None:
    bits_W = packed([97], len(VOCABULARY))
    limit(0).apply_mask(bits_W)
    assert not bits_W.any()


def test_tokens_may_be_accepted_together() -> None:
    constraint = limit(3)
    constraint.accept_tokens([*b"abc", END, *b"de"])
    assert allowed(constraint) == ALL


@pytest.mark.parametrize(
    ("tokenizer", "end", "options", "message"),
    [
        (None, "</think>", {}, "no tokens for '</think>'"),
        (Numbers(), "7000", {}, "no tokens for '7000'"),
        (Numbers(), "7", {"use_beam_search": True, "n": 2, "temperature": 0}, "beam search"),
    ],
    ids=["without a tokenizer", "an unknown token", "beam search"],
)
def test_a_budget_needs_a_marker_to_force(
    tokenizer: Any, end: str, options: dict[str, Any], message: str
) -> None:
    budget = ThinkingBudget(tokens=1, begun=True, starts=("6",), ends=(end,))
    with pytest.raises(RequestError, match=message) as error:
        LogitsOptionsReader(replace(RESOLVED, vocab_size=128), tokenizer).validate_options(
            SamplingParams(**options), budget
        )
    assert error.value.param == "thinking_token_budget"


class Decoding(Numbers):
    """Texts of numbers."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def test_each_choice_has_a_limit_of_its_own() -> None:
    budget = ThinkingBudget(tokens=1, begun=True, starts=("6",), ends=("7",))
    model = replace(RESOLVED, vocab_size=128)
    reader = LogitsOptionsReader(model, Decoding())  # type: ignore[arg-type]
    params = SamplingParams(bad_words=["1 2"])
    first, second = reader.read_options(params, budget), reader.read_options(params, budget)
    assert first is not None and second is not None
    assert len(first.constraints) == 2
    assert first.constraints[1] is not second.constraints[1]
    assert reader.read_options(SamplingParams(), budget) is not None
    assert reader.read_options(SamplingParams()) is None
