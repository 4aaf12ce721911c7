"""Log-probabilities that are made when they are read equal those of a list made at once."""

from __future__ import annotations

import copy
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.library.outputs import (
    CompletionOutput,
    Logprob,
    OutputBuilder,
    Positions,
    PromptPositions,
    RequestOutput,
    nameless,
)
from jaxllm.logprobs import packed_from
from jaxllm.messages import GenerateRequest, PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams

TOKENS = [4, 7, 4, 9, 2]
ENTRIES = [
    TokenLogprobs(token_id=token, logprob=-0.5 * at, rank=1 + at, top=[(4, -0.25), (9, -1.5)])
    for at, token in enumerate(TOKENS)
]


def text_of(token: int) -> str:
    return f"<{token}>"


def eager() -> list[dict[int, Logprob]]:
    """By the definition, one entry after another."""
    positions = []
    for entry in ENTRIES:
        made = {entry.token_id: Logprob(entry.logprob, entry.rank, text_of(entry.token_id))}
        for rank, (token, value) in enumerate(entry.top, 1):
            made.setdefault(token, Logprob(value, rank, text_of(token)))
        positions.append(made)
    return positions


def lazy() -> Positions:
    return Positions(TOKENS, packed_from(ENTRIES, 2), text_of)


def test_positions_are_those_of_the_list() -> None:
    found, expected = lazy(), eager()
    assert list(found) == expected
    assert [list(position) for position in found] == [list(position) for position in expected], (
        "the token that is there comes first"
    )
    assert (found == expected, expected == found, found == lazy(), found != expected) == (
        True,
        True,
        True,
        False,
    )
    assert len(found) == 5
    assert repr(found) == repr(expected)
    assert list(reversed(found)) == expected[::-1]
    assert expected[3] in found and found.index(expected[3]) == 3 and {} not in found
    assert found.total == sum(entry.logprob for entry in ENTRIES)


def test_what_differs_is_not_equal() -> None:
    found, other = lazy(), eager()
    other[4][2].logprob += 1
    assert found != other and found != eager()[:4] and found != "x" and found != tuple(eager())
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)


@given(
    st.none() | st.integers(-7, 7),
    st.none() | st.integers(-7, 7),
    st.none() | st.sampled_from([-3, -1, 1, 2]),
)
def test_slices_are_those_of_the_list(
    start: int | None, stop: int | None, step: int | None
) -> None:
    assert lazy()[start:stop:step] == eager()[start:stop:step]


@pytest.mark.parametrize("index", range(-6, 6))
def test_an_index_means_what_it_means_for_a_list(index: int) -> None:
    if -5 <= index < 5:
        assert lazy()[index] == eager()[index]
    else:
        with pytest.raises(IndexError, match=f"index {index} of 5 positions"):
            lazy()[index]


def test_copies_are_plain_lists() -> None:
    for made in (copy.copy(lazy()), copy.deepcopy(lazy())):
        assert type(made) is list
        assert made == eager()


def test_without_tokens_and_without_names() -> None:
    nothing = Positions([], b"", text_of)
    assert nothing == [] and not nothing
    found = Positions([4], packed_from(ENTRIES[:1], 0), nameless)
    assert found == [{4: Logprob(0.0, 1, None)}]
    assert CompletionOutput(0, logprobs=found) == CompletionOutput(
        0, logprobs=[{4: Logprob(0.0, 1, None)}]
    )


@pytest.mark.parametrize("size", range(1, 6))
def test_the_first_token_of_a_prompt_has_none(size: int) -> None:
    found = PromptPositions([1, *TOKENS[: size - 1]], packed_from(ENTRIES[: size - 1], 2), text_of)
    expected = [None, *eager()[: size - 1]]
    assert found == expected
    assert [found[index] for index in range(-size, size)] == expected * 2
    assert found[1:] == expected[1:]


def test_deltas_add_up_to_the_result() -> None:
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=2)
    growing = OutputBuilder(
        GenerateRequest(id="r", prompt=Prompt([1, *TOKENS]), params=params), "p", text_of
    )
    scores = PromptLogprobs(top=2, packed=packed_from(ENTRIES, 2))
    for index in range(2):
        for at, entry in enumerate(ENTRIES):
            last = at == 4
            ended = growing.add_delta(
                TextDelta(
                    id="r",
                    index=index,
                    token_ids=[entry.token_id],
                    text="" if at == 2 else f"{at}",
                    logprobs=packed_from([entry], 2),
                    prompt_logprobs=scores if at == 1 else None,
                    finish_reason="stop" if last else None,
                    stop_reason=7 if last else None,
                    num_cached_tokens=3,
                )
            )
            assert ended == (last and index == 1)
    choices = [
        CompletionOutput(
            index,
            "0134",
            TOKENS,
            cumulative_logprob=-5.0,
            logprobs=eager(),
            finish_reason="stop",
            stop_reason=7,
        )
        for index in range(2)
    ]
    expected = RequestOutput(
        "r",
        "p",
        [1, *TOKENS],
        choices,
        finished=True,
        num_cached_tokens=3,
        prompt_logprobs=[None, *eager()],
    )
    assert growing.output == expected
    assert growing.add_delta(
        TextDelta(id="r", index=0, token_ids=[], text="", finish_reason="error", error="broken")
    )
    assert (
        choices[0].text,
        growing.output.outputs[0].finish_reason,
        growing.output.outputs[0].error,
    ) == ("0134", "error", "broken")


def test_a_token_leaves_nothing_for_the_garbage_collector() -> None:
    growing = OutputBuilder(
        GenerateRequest(id="r", prompt=Prompt([1]), params=SamplingParams(logprobs=2)),
        None,
        text_of,
    )
    gc.collect()
    before = len(gc.get_objects())
    for at in range(1000):
        row, text, last = packed_from(ENTRIES[:1], 2), str(at), "length" if at == 999 else None
        growing.add_delta(
            TextDelta(id="r", index=0, token_ids=[4], text=text, logprobs=row, finish_reason=last)
        )
    assert len(gc.get_objects()) - before < 100
    assert growing.output.outputs[0].logprobs == eager()[:1] * 1000
