"""Options of a request that change its logits, as they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.messages import RequestError
from jaxllm.sampling.bits import has, packed
from jaxllm.sampling.options import SamplingParams
from jaxllm.tokenizer import Tokenizer
from tests.engine.conftest import TINY, Numbers
from tests.server.fake import RESOLVED

V = TINY["vocab_size"]
MODEL = replace(RESOLVED, vocab_size=V)


def test_what_was_checked_is_not_read_again_and_what_changed_is() -> None:
    class Counting(Numbers):
        """Counts what it is asked."""

        calls = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.calls += 1
            return super().encode(text)

    tokenizer = Counting()
    asking = LogitsOptionsReader(MODEL, tokenizer)  # type: ignore[arg-type]
    params = SamplingParams(bad_words=["1 2"], n=3)
    asking.validate_options(params)
    first, second = asking.read_options(params), asking.read_options(params)
    assert tokenizer.calls == 2, "alone and with a space before it"
    assert (
        first is not None
        and second is not None
        and first.constraints[0] is not second.constraints[0]
    )
    other = replace(params, bad_words=["3"])
    asking.validate_options(other)
    found = asking.read_options(other)
    assert found is not None and not found.constraints and not has(found.allowed_W, 3)


@pytest.mark.parametrize(
    ("word", "forbids", "allows"),
    [
        ("46", ["46", " 46", "\n46"], ["4", " 4"]),
        (" 46", ["46", " 46"], ["4"]),
        ("\n46", ["\n46"], ["46", " 46", "\n"]),
        ("\n", ["\n"], [" ", "a"]),
        (" ", [" "], ["\n", "a"]),
        ("\t", ["\t"], [" ", "\n"]),
    ],
)
def test_a_bad_word_counts_as_it_is_written_and_after_a_space(
    word: str, forbids: list[str], allows: list[str], repo: Path
) -> None:
    tokenizer = Tokenizer.load(repo / "jaxllm" / "demo")
    asked = LogitsOptionsReader(replace(RESOLVED, vocab_size=800), tokenizer).read_options(
        SamplingParams(bad_words=[word])
    )
    assert asked is not None

    def forbidden(text: str) -> bool:
        *before, last = tokenizer.encode(text, add_special_tokens=False)
        if not has(asked.allowed_W, last):
            return True
        allowed_W = asked.allowed_W.copy()
        for constraint in asked.constraints:
            constraint.accept_tokens(before)
            constraint.apply_mask(allowed_W)
        return not has(allowed_W, last)

    assert [text for text in forbids + allows if forbidden(text)] == forbids


def test_a_bad_word_with_a_token_beyond_the_models_vocabulary_forbids_nothing() -> None:
    """The model cannot generate it."""
    tokenizer = Numbers()
    reader = LogitsOptionsReader(MODEL, tokenizer)  # type: ignore[arg-type]
    words = [f"{V}", f"{V + 7} 1", f"1 {V}", "1 2"]
    found, expected = (
        reader.read_options(SamplingParams(bad_words=given)) for given in (words, ["1 2"])
    )
    assert found is not None and expected is not None
    assert np.array_equal(found.allowed_W, expected.allowed_W)
    for options in (found, expected):
        (constraint,) = options.constraints
        constraint.accept_tokens([1])
        constraint.apply_mask(allowed_W := packed(range(V), V))
        assert [id for id in range(V) if not has(allowed_W, id)] == [2]
    assert reader.read_options(SamplingParams(bad_words=words[:1])) is not None


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        LogitsOptionsReader(MODEL, None).read_options(SamplingParams(bad_words=["x"]))
