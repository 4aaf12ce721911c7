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


WORDS = ["<unk>", "▁", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]


def spaced_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """In the manner of SentencePiece: ▁ is a space, bytes are a fallback, and a text's first space is not shown."""
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(WORDS)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


SPACED = [
    spaced_tokenizer(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
        )
    ),
    spaced_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
]
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


def spaced_text(tokenizer: Tokenizer, prompt: list[str], tokens: list[str]) -> str:
    """What is shown of `tokens` after `prompt`, both given as the tokens' names."""
    ids = [[tokenizer.token_to_id(name) for name in names] for names in (prompt, tokens)]
    return "".join(feed_all(Detokenizer(tokenizer, ids[0], True, []), ids[1])[0])


@pytest.mark.parametrize("tokenizer", SPACED, ids=["replace", "metaspace"])
@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        (["▁b"], ["▁a", *["<0xFF>"] * 8, "▁b", "▁a"], " a" + "\ufffd" * 8 + " b a"),
        (["▁b"], ["▁a", *["<end>"] * 8, "▁b", "▁a"], " a b a"),
        (["▁b", *["<end>"] * 8], ["▁a", "▁b"], " a b"),
        (["▁b", *["<end>"] * 200], ["▁a", "▁b"], " a b"),
        (["<end>"] * 20, ["▁a", "▁b"], "a b"),
        ([], [*["<0xFF>"] * 8, "▁b", "▁a"], "\ufffd" * 8 + " b a"),
        ([], ["▁a", "▁", "▁", "▁b", "c"], "a   bc"),
        (["▁a"], ["▁", "<0xC3>", "<0xA9>", "c", "▁a"], " éc a"),
        (["▁a", "<0xC3>", "<0xA9>"], ["<0x41>", "▁b"], "A b"),
        (["▁a", "<0xC3>"], ["<0xA9>", "▁b"], "é b"),
    ],
    ids=range(10),
)  # fmt: skip
def test_words_keep_their_space_after_broken_characters_and_skipped_tokens(
    tokenizer: Tokenizer, prompt: list[str], tokens: list[str], text: str
) -> None:
    assert spaced_text(tokenizer, prompt, tokens) == text


@pytest.mark.parametrize("tokenizer", SPACED, ids=["replace", "metaspace"])
@given(tokens=st.lists(st.sampled_from(["▁", "▁a", "▁b", "c", "<end>"]), max_size=30))
def test_shown_words_add_up_to_the_decoded_whole(tokenizer: Tokenizer, tokens: list[str]) -> None:
    ids = [tokenizer.token_to_id(name) for name in ["c", *tokens]]
    assert "c" + spaced_text(tokenizer, ["c"], tokens) == tokenizer.decode(ids)


def test_a_flood_of_skipped_tokens_costs_linear_time() -> None:
    start = time.perf_counter()
    shown, _ = feed_all(Detokenizer(TOKENIZER, [END] * 100_000, True, []), [*[END] * 4000, *encode("a")])
    assert time.perf_counter() - start < 2
    assert "".join(shown) == "a"


class Panic(BaseException):
    """As the panics of native code, no Exception."""


class Panicking:
    """A tokenizer whose decoder fails on one token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if END in ids:
            raise Panic
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, id: int) -> str | None:
        return TOKENIZER.id_to_token(id)


def test_a_panic_of_the_decoder_is_shown_as_broken_characters_and_ends() -> None:
    shown, _ = feed_all(Detokenizer(Panicking(), encode("x"), False, []), [*encode("a"), END, *encode("b" * 20)])  # type: ignore[arg-type]
    text = "".join(shown)
    assert text.startswith("a\ufffd")
    assert text.endswith("bbb")
