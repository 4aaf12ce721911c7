"""Tokens to text: borders, stop strings, held-back matches, broken characters."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.engine.detok import Detokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte, plus a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<end>")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def feed_all(detok: Detokenizer, tokens: list[int]) -> tuple[list[str], str | None]:
    """Every text that was shown, and the stop string that ended it."""
    shown = []
    for token in tokens:
        step = detok.feed([token])
        shown.append(step.text)
        if step.stop is not None:
            return shown, step.stop
    return [*shown, detok.finish()], None


@given(st.text(max_size=40))
def test_the_shown_pieces_add_up_to_the_text(text: str) -> None:
    shown, stop = feed_all(Detokenizer(TOKENIZER, encode("x"), True, []), encode(text))
    assert "".join(shown) == text
    assert stop is None


@given(st.text("ab€", max_size=30), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_just_before_the_first_stop_string_and_never_shows_a_part_of_it(text: str, stops: list[str]) -> None:
    shown, stop = feed_all(Detokenizer(TOKENIZER, encode("x"), True, stops), encode(text))
    # The first stop string is the one that is complete first, then the one that starts first.
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        assert ("".join(shown), stop) == (text, None)
    else:
        first_end = min(end for end, _, _ in ends)
        start = min(at for end, at, _ in ends if end == first_end)
        assert "".join(shown) == text[:start]
        assert stop is not None
        assert text.startswith(stop, start)


def test_a_stop_string_is_found_across_token_borders_and_a_partial_match_is_shown_when_it_fails() -> None:
    detok = Detokenizer(TOKENIZER, encode("x"), True, ["END"])
    assert [detok.feed([t]).text for t in encode("aENb")] == ["a", "", "", "ENb"]
    assert [detok.feed([t]).stop for t in encode("END")] == [None, None, "END"]


def test_min_tokens_lets_a_stop_string_pass() -> None:
    detok = Detokenizer(TOKENIZER, encode("x"), True, ["b"], min_tokens=3)
    shown, stop = feed_all(detok, encode("abcb"))
    assert ("".join(shown), stop) == ("abc", "b")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_skipped_when_asked(skip: bool, text: str) -> None:
    shown, _ = feed_all(Detokenizer(TOKENIZER, encode("x"), skip, []), [*encode("a"), END, *encode("b")])
    assert "".join(shown) == text


def test_a_flood_of_broken_characters_costs_linear_time_and_is_shown() -> None:
    lead = encode("é")[0]
    detok = Detokenizer(TOKENIZER, encode("x"), True, [])
    start = time.perf_counter()
    shown, _ = feed_all(detok, [lead] * 4000)
    assert time.perf_counter() - start < 2
    assert set("".join(shown)) == {"\ufffd"}


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement() -> None:
    shown, _ = feed_all(Detokenizer(TOKENIZER, encode("x"), True, []), encode("aé")[:-1])
    assert "".join(shown) == "a\ufffd"
