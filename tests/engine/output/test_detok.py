"""Tokens to text: borders, stop strings, held-back matches, broken characters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.engine.output.detok import Detokenizer, StopStrings
from jaxllm.sampling.options import SamplingParams


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """One token per byte, those that merges make, and a special token."""
    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(left + right for left, right in merges),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


WORDS = ["<unk>", "▁", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]


def spaced_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """In the manner of SentencePiece: ▁ is a space, bytes are a fallback, and a text's first space
    is not shown."""
    tokenizer = Tokenizer(
        models.BPE(vocab={word: at for at, word in enumerate(WORDS)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


SPACED = [
    spaced_tokenizer(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
    ),
    spaced_tokenizer(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
]
TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<end>")
MERGES = [("a", "b"), ("b", "a"), ("â", "Ĥ"), ("ab", "ba"), ("âĤ", "¬"), ("âĤ¬", "a"), ("¬", "b")]
MERGED = byte_tokenizer(MERGES)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def detokenizer(
    prompt: list[int] | None = None, tokenizer: Any = TOKENIZER, **options: Any
) -> Detokenizer:
    return Detokenizer(
        tokenizer, encode("x") if prompt is None else prompt, SamplingParams(**options)
    )


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
    shown, stop = feed_all(detokenizer(), encode(text))
    assert "".join(shown) == text
    assert stop is None


@given(
    st.text("ab€", max_size=30),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_just_before_the_first_stop_string_and_never_shows_a_part_of_it(
    text: str, stops: list[str]
) -> None:
    shown, stop = feed_all(detokenizer(stop=stops), encode(text))
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


def test_a_stop_string_is_found_across_tokens_and_a_partial_match_is_shown_when_it_fails() -> None:
    detok = detokenizer(stop=["END"])
    assert [detok.feed([t]).text for t in encode("aENb")] == ["a", "", "", "ENb"]
    assert [detok.feed([t]).stop for t in encode("END")] == [None, None, "END"]


def test_min_tokens_lets_a_stop_string_pass() -> None:
    detok = detokenizer(stop=["b"], min_tokens=2)
    shown, stop = feed_all(detok, encode("abcb"))
    assert ("".join(shown), stop) == ("abc", "b")


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """`text` cut where told."""
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


TEXTS = st.text("ab€\ufffd", max_size=24)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4)


@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=10), st.integers(0, 12))
def test_where_a_text_ends_does_not_depend_on_its_pieces(
    text: str, stops: list[str], include: bool, cuts: list[int], free: int
) -> None:
    free = min(free, len(text))  # characters in which nothing ends it
    found, shown, stop = StopStrings(stops, include), [], None
    for piece, may_end in [
        (text[:free], False),
        *((piece, True) for piece in pieces_of(text[free:], cuts)),
    ]:
        step = found.feed(piece, may_end)
        shown.append(step.text)
        if (stop := step.stop) is not None:
            break
    else:
        shown.append(found.finish())
    ends = [
        (at + len(s), at, s)
        for s in stops
        for at in range(len(text))
        if text.startswith(s, at) and at + len(s) > free
    ]
    if not ends:
        assert ("".join(shown), stop) == (text, None)
    else:
        end, start, first = min(ends)
        assert ("".join(shown), stop) == (text[: end if include else start], first)


@given(st.text("ab", min_size=1, max_size=12), st.text("ab", min_size=2, max_size=4))
def test_what_is_held_back_may_still_become_a_stop_string_and_is_the_least(
    text: str, stop: str
) -> None:
    step = StopStrings([stop]).feed(text)
    if step.stop is None:
        held = text[len(step.text) :]
        assert stop.startswith(held)
        assert not any(
            stop.startswith(text[-size:])
            for size in range(len(held) + 1, len(stop))
            if size <= len(text)
        )
        assert StopStrings([stop], include=True).feed(text).text == text


@given(
    st.text("ab€", max_size=20),
    st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_tokens_that_hold_a_part_of_a_character_or_several_give_the_same_text(
    text: str, stops: list[str], min_tokens: int
) -> None:
    merged = [
        MERGED.encode(text).ids,
        [MERGED.token_to_id(TOKENIZER.id_to_token(id)) for id in encode(text)],
    ]
    for include in (False, True):
        options = {"stop": stops, "include_stop_str_in_output": include}
        results = [feed_all(detokenizer([], tokenizer=MERGED, **options), ids) for ids in merged]
        assert ("".join(results[0][0]), results[0][1]) == ("".join(results[1][0]), results[1][1])
    shown, stop = feed_all(detokenizer(stop=stops, min_tokens=min_tokens), encode(text))
    assert stop is None or len(shown) > min_tokens


def test_with_the_stop_string_in_the_text_nothing_is_held_back_and_nothing_follows_it() -> None:
    detok = detokenizer([], tokenizer=MERGED, stop=["€b"], include_stop_str_in_output=True)
    steps = [detok.feed([MERGED.token_to_id(token)]) for token in ("a", "â", "Ĥ", "¬", "ba")]
    assert [(step.text, step.stop) for step in steps] == [
        ("a", None),
        ("", None),
        ("", None),
        ("€", None),
        ("b", "€b"),
    ]


@pytest.mark.parametrize(
    ("spaces", "text"), [(True, " a <end> <end> b"), (False, " a <end><end> b")]
)
def test_special_tokens_in_a_row_are_not_spaced_when_asked(spaces: bool, text: str) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    words.add_special_tokens(["<end>"])  # without a decoder, words are joined with spaces
    detok = detokenizer(
        [0], tokenizer=words, skip_special_tokens=False, spaces_between_special_tokens=spaces
    )
    assert "".join(feed_all(detok, [0, 2, 2, 1])[0]) == text


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_skipped_when_asked(skip: bool, text: str) -> None:
    shown, _ = feed_all(detokenizer(skip_special_tokens=skip), [*encode("a"), END, *encode("b")])
    assert "".join(shown) == text


def assert_linear(work: Callable[[int], object]) -> None:
    """Four times as much takes less than eight times as long, in the best of a few tries; the
    square would take sixteen."""

    def seconds(size: int) -> float:
        start = time.thread_time()
        work(size)
        return time.thread_time() - start

    assert any(seconds(4000) < 8 * seconds(1000) for _ in range(5))


def test_a_flood_of_broken_characters_costs_linear_time_and_is_shown() -> None:
    lead = encode("é")[0]
    assert_linear(lambda size: feed_all(detokenizer(), [lead] * size))
    assert set("".join(feed_all(detokenizer(), [lead] * 1000)[0])) == {"\ufffd"}


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement() -> None:
    shown, _ = feed_all(detokenizer(), encode("aé")[:-1])
    assert "".join(shown) == "a\ufffd"


def spaced_text(tokenizer: Tokenizer, prompt: list[str], tokens: list[str]) -> str:
    """What is shown of `tokens` after `prompt`, both given as the tokens' names."""
    ids = [[tokenizer.token_to_id(name) for name in names] for names in (prompt, tokens)]
    return "".join(feed_all(detokenizer(ids[0], tokenizer=tokenizer), ids[1])[0])


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
    def shown(size: int) -> str:
        return "".join(feed_all(detokenizer([END] * 25 * size), [*[END] * size, *encode("a")])[0])

    assert_linear(shown)
    assert shown(1000) == "a"


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
    shown, _ = feed_all(
        detokenizer(encode("x"), tokenizer=Panicking(), skip_special_tokens=False),
        [*encode("a"), END, *encode("b" * 20)],
    )
    text = "".join(shown)
    assert text.startswith("a\ufffd")
    assert text.endswith("bbb")
