"""Matchers: their masks allow only the requested structure, and a limit ends one matcher alone."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer

from jaxllm.grammar import matcher as module
from jaxllm.grammar.checker import Checker, special_tokens
from jaxllm.grammar.matcher import MAX_IDLE, GrammarError, Matcher, Matchers
from jaxllm.grammar.structure import StructuredOutputsParams, StructureError
from tests.grammar.conftest import EOS, WIDTH, Speaker, allowed_by
from tests.grammar.schemas import every

SCHEMAS = every()
LARK = """
start: sum
sum: product | sum "+" product
product: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
TAGS = {
    "structures": [
        {"begin": "<tool_call>", "schema": SCHEMAS["point"], "end": "</tool_call>"},
        {"begin": "<function=f>", "schema": SCHEMAS["lamp"], "end": "</function>"},
    ],
    "triggers": ["<tool_call>", "<function="],
}


def assert_valid(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("name", list(SCHEMAS)[::7])
def test_what_is_said_under_a_schema_is_valid(speaker: Speaker, name: str) -> None:
    assert_valid(speaker.say(1, json=SCHEMAS[name]), SCHEMAS[name])


@pytest.mark.slow
def test_what_is_said_under_each_of_two_hundred_schemas_is_valid(speaker: Speaker) -> None:
    assert len(SCHEMAS) == 200
    for schema in SCHEMAS.values():
        assert_valid(speaker.say(0, json=schema), schema)


INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/E"}}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INTEGER}, "patternProperties": {"^a$": {"maximum": 5}}},
        {"properties": {"a": {}, "b": INTEGER}, "patternProperties": {"^(a|b)$": INTEGER}},
        {"patternProperties": {"^a$": INTEGER}, "required": ["a"]},
        {"allOf": [{"properties": {"a": {"maximum": 5}}}], "patternProperties": {"^a$": INTEGER}},
        {"properties": {"a": INTEGER}, "patternProperties": {"^a$": {}, "^b": INTEGER}},
        {"properties": {"": INTEGER}, "patternProperties": {"^$": {}}},
        {
            "properties": {"a": {"$ref": "#/$defs/E"}, "b": INTEGER},
            "$defs": {"E": ENDLESS},
        },
        {
            "properties": {"a": {"anyOf": [{"$ref": "#/$defs/E"}, INTEGER]}},
            "required": ["a"],
            "$defs": {"E": ENDLESS},
        },
        {
            "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
            "required": ["kids"],
        },
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": INTEGER}, "required": ["a"]},
    ],
)
def test_no_grammar_leads_where_nothing_can_follow(
    speaker: Speaker, schema: dict[str, Any]
) -> None:
    closed = {"type": "object", "additionalProperties": False} | schema
    for seed in range(12):
        assert_valid(speaker.say(seed, json=closed), closed)


@pytest.mark.parametrize("pattern", [".*", "^.*$", ""])
def test_what_every_key_matches_holds_for_every_key(speaker: Speaker, pattern: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: INTEGER}, "maxProperties": 3}
    for seed in range(12):
        assert_valid(speaker.say(seed, json=schema), schema)


NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.builds(
        lambda base, off: base + off,
        st.sampled_from([2**53, -(2**53), 2**63, -(2**63), 10**20]),
        st.integers(-3, 3),
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(-1000, 1000, places=3).map(float),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(low=NUMBERS, high=NUMBERS, integer=st.booleans())
def test_a_number_is_honoured_exactly_or_refused(
    speaker: Speaker, low: float, high: float, integer: bool
) -> None:
    low, high = sorted((low, high))
    for schema in (
        {"const": low},
        {"type": "integer" if integer else "number", "minimum": low, "maximum": high},
    ):
        try:
            text = speaker.say(0, json=schema)
        except StructureError:
            continue
        assert_valid(text, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53}, {"const": -(2**53)}, {"enum": [0.1, 1e-7, 3.141592653589793]},
        {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": 2**53 - 2, "maximum": 2**53},
    ],
)  # fmt: skip
def test_large_numbers_that_are_honoured_are_said_exactly(
    speaker: Speaker, schema: dict[str, Any]
) -> None:
    for seed in range(5):
        assert_valid(speaker.say(seed, json=schema), schema)


def test_spacing_of_json_is_as_asked(speaker: Speaker) -> None:
    schema = SCHEMAS["call"]
    compact = speaker.say(2, json=schema, disable_any_whitespace=True)
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"), ensure_ascii=False)
    spaced = speaker.say(2, json=schema, whitespace_pattern=" ")
    outside = re.sub('"[^"]*"', "text", spaced)
    assert " " in outside
    assert not re.search(r"  |\n|\t", outside)
    assert_valid(spaced, schema)


@pytest.mark.parametrize("indent", [None, 2, 8])
def test_pretty_printed_json_is_a_json_object(
    speaker: Speaker, tokenizer: Tokenizer, indent: int | None
) -> None:
    text = json.dumps({"a": [1, {"b": None}], "c": "ü\n😀"}, indent=indent, ensure_ascii=False)
    matcher = speaker.matcher(json_object=True)
    matcher.accept_tokens(tokenizer.encode(text, add_special_tokens=False).ids)
    assert matcher.complete


@pytest.mark.parametrize(
    "regex",
    [
        "(a+)+b", "[0-9]{3}-[0-9]{4}", r"\d{1,3}(\.\d{1,3}){3}", "(yes|no)( maybe)?",
        r"[A-Z][a-z]{0,9} [\w.]{1,5}@x\.(org|com)", "a|b|", "[^a]{5}",
        r"(?i)hello( world)?", r"\$\{[a-z]+\}", "ü{2}|😀", "(ab?c*d+){2,3}", r"[\d\s]{3}",
        "a/b|^c$", "//x\n",
    ],
)  # fmt: skip
def test_what_is_said_under_a_regex_matches_it_whole(speaker: Speaker, regex: str) -> None:
    for seed in range(3):
        text = speaker.say(seed, regex=regex)
        assert re.fullmatch(regex, text), text


def test_a_choice_is_said_exactly(speaker: Speaker) -> None:
    choices = ["yes", "yes!", "no", '"quoted"', "two\nlines", "ü😀", "\\", "a/b"]
    assert {speaker.say(seed, choice=choices) for seed in range(60)} == set(choices)


def test_what_is_said_under_a_grammar_parses(speaker: Speaker) -> None:
    for seed in range(5):
        text = speaker.say(seed, grammar=LARK)
        assert re.fullmatch(r"[0-9+()]+", text)
        assert isinstance(sum(map(int, re.findall("[0-9]+", text))), int)
        flat = text
        while (shorter := re.sub(r"\((\d{1,3}(\+\d{1,3})*)\)", "1", flat)) != flat:
            flat = shorter
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*", flat)


def test_a_grammar_may_be_gbnf(speaker: Speaker) -> None:
    assert {
        speaker.say(seed, grammar='root ::= ("a" | "b") end\nend ::= "!"?') for seed in range(40)
    } == {"a", "b", "a!", "b!"}


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('Hm. <tool_call>{"x":1,"y":-2.5}</tool_call> Done.', True),
        ('<function=f>{"on":true,"level":3,"scene":null}</function>', True),
        ("free text with < and <func", True),
        ('<tool_call>{"x":1}</tool_call>', False),
        ("<function=g>", False),
        ('<tool_call>{"x":1,"y":2}</function>', False),
    ],
)
def test_a_tag_follows_its_schema_and_text_around_it_is_free(
    speaker: Speaker, tokenizer: Tokenizer, text: str, follows: bool
) -> None:
    matcher = speaker.matcher(structural_tag=TAGS)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if follows:
        matcher.accept_tokens(ids)
        assert matcher.complete
    else:
        with pytest.raises(GrammarError):
            matcher.accept_tokens(ids)


def test_it_ends_when_nothing_can_follow_and_may_end_before(
    speaker: Speaker, tokenizer: Tokenizer
) -> None:
    matcher = speaker.matcher(choice=["a", "ab"])
    a, b = (tokenizer.token_to_id(c) for c in "ab")
    assert not matcher.complete
    matcher.accept_tokens([a])
    assert matcher.complete and not matcher.ended
    assert set(allowed_by(matcher)) == {b, *EOS}
    matcher.accept_tokens([b])
    assert matcher.ended


@pytest.mark.parametrize("eos", EOS)
def test_every_end_of_sequence_ends_it(speaker: Speaker, eos: int) -> None:
    matcher = speaker.matcher(regex="a*")
    matcher.accept_tokens([eos])
    assert matcher.ended


def test_neither_padding_of_the_logits_nor_special_tokens_are_ever_text(
    speaker: Speaker, tokenizer: Tokenizer
) -> None:
    allowed = set(allowed_by(speaker.matcher(regex="(.|\n)*")))
    specials = set(special_tokens(tokenizer).values()) - set(EOS)
    assert max(allowed) < tokenizer.get_vocab_size() < WIDTH
    assert not allowed & specials
    assert len(allowed) > 600, "all but bytes that begin no character"


def test_tokens_without_a_logit_are_neither_allowed_nor_forced(
    checker: Checker, tokenizer: Tokenizer
) -> None:
    text, width = "The question is about numbers and words", 450
    assert max(tokenizer.encode(text).ids) > width
    matchers, said = Matchers(tokenizer, width, [3]), []
    try:
        grammar = checker.compile_params(StructuredOutputsParams(choice=[text]))
        matcher = matchers.start_matcher(grammar).result(60)
        assert matcher.mask_words == -(-width // 32)
        while not matcher.ended:
            bits = np.full(matcher.mask_words, 2**32 - 1, np.uint32)
            matcher.apply_mask(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            tokens = matcher.forced_tokens() or allowed[:1].tolist()
            assert max(tokens) < width and tokens[0] in allowed
            matcher.accept_tokens(tokens)
            said += tokens
    finally:
        matchers.end_threads()
    assert tokenizer.decode(said, skip_special_tokens=True) == text


def test_a_mask_only_takes_away(speaker: Speaker) -> None:
    matcher = speaker.matcher(regex="[ab]")
    bits = np.zeros(-(-WIDTH // 32), np.uint32)
    matcher.apply_mask(bits)
    assert not bits.any()


def test_forced_tokens_are_those_that_masks_leave_alone(speaker: Speaker) -> None:
    """Appending these tokens without a draw gives the same output."""
    found = 0
    for name in ("user", "call-list", "box-tree", "song-result"):
        rng, matcher = random.Random(3), speaker.matcher(json=SCHEMAS[name])
        while not matcher.ended:
            forced = matcher.forced_tokens()
            found += len(forced)
            for token in forced:
                assert allowed_by(matcher) == [token]
                matcher.accept_tokens([token])
            if not matcher.ended:
                matcher.accept_tokens(
                    [rng.choice([t for t in allowed_by(matcher) if t not in EOS] or EOS)]
                )
    assert found > 20


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
        ({"regex": "say <tool_call>x{3}</tool_call>!"}, "say <tool_call>xxx</tool_call>!"),
        ({"json": {"const": "a <think>"}}, '"a <think>"'),
        (
            {"grammar": 'start: "é<|im_end|>" <|im_start|> "<think>"'},
            "é<|im_end|><|im_start|><think>",
        ),
    ],
    ids=["choice", "regex", "json", "grammar"],
)
def test_text_that_looks_like_a_special_token_is_said_as_text(
    speaker: Speaker, tokenizer: Tokenizer, given: Any, text: str
) -> None:
    matcher, said = speaker.matcher(**given), []
    while not matcher.ended:
        tokens = matcher.forced_tokens() or allowed_by(matcher)[:1]
        matcher.accept_tokens(tokens)
        said += tokens
    specials = [token for token in said if token >= EOS[0] and token not in EOS]
    assert (
        tokenizer.decode([token for token in said if token not in EOS], skip_special_tokens=False)
        == text
    )
    assert specials == ([tokenizer.token_to_id("<|im_start|>")] if "grammar" in given else [])


def test_a_token_that_does_not_follow_is_an_error_and_stays_one(
    speaker: Speaker, tokenizer: Tokenizer
) -> None:
    matcher = speaker.matcher(regex="aaa")
    with pytest.raises(GrammarError):
        matcher.accept_tokens([tokenizer.token_to_id("b")])
    assert not matcher.ended
    with pytest.raises(GrammarError):
        matcher.apply_mask(np.zeros(-(-WIDTH // 32), np.uint32))


def test_a_grammar_that_explodes_later_fails_at_a_limit(speaker: Speaker) -> None:
    with pytest.raises(GrammarError, match="too"):
        speaker.speak(speaker.matcher(regex="(.{0,200}a){50}"), 0)


def test_a_grammar_that_leads_nowhere_later_says_so(speaker: Speaker) -> None:
    start = "ab" * 60  # the compiler tries out less
    with pytest.raises(GrammarError, match="nothing that ends can match it"):
        speaker.speak(speaker.matcher(grammar=f'start: "{start}" nowhere\nnowhere: nowhere'), 0)


def test_measured_masks_are_those_found_together_and_need_no_new_threads(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, matchers = (
        module.ParallelMatchers(),
        [speaker.matcher(regex=regex) for regex in ("ab|cd", "[0-9]+", "x")],
    )
    one.start_masks(matchers)
    found = one.wait_masks().copy()
    monkeypatch.setattr(module, "ThreadPoolExecutor", None)
    for _ in range(2):
        measured, costs = one.timed_masks(matchers)
        assert np.array_equal(measured, found) and len(costs) == 3 and min(costs) >= 0


def test_matchers_of_one_grammar_are_independent(speaker: Speaker, tokenizer: Tokenizer) -> None:
    one, other = (speaker.matcher(regex="ab|cd") for _ in range(2))
    one.accept_tokens([tokenizer.token_to_id("a")])
    assert allowed_by(one) == [tokenizer.token_to_id("b")]
    other.accept_tokens([tokenizer.token_to_id("c")])
    assert allowed_by(other) == [tokenizer.token_to_id("d")]


def test_a_matcher_is_used_again_from_its_start_but_not_after_an_error(
    speaker: Speaker, matchers: Matchers, tokenizer: Tokenizer
) -> None:
    used = speaker.matcher(regex="once|more")
    speaker.speak(used, 0)
    matchers.recycle(used)
    again = speaker.matcher(regex="once|more")
    assert again is used
    assert not again.complete
    with pytest.raises(GrammarError):
        again.accept_tokens([tokenizer.token_to_id("z")])
    matchers.recycle(again)
    assert speaker.matcher(regex="once|more") is not again


def test_idle_matchers_are_bounded_and_the_least_recent_go_first(tokenizer: Tokenizer) -> None:
    matchers = Matchers(tokenizer, WIDTH, EOS)
    grammars = [f'start: "a{n}"' for n in range(MAX_IDLE + 10)]
    made: list[Matcher] = []
    for grammar in grammars:
        made.append(matchers.start_matcher(grammar).result(60))
        matchers.recycle(made[-1])
    assert len(matchers._idle) == MAX_IDLE
    assert matchers.start_matcher(grammars[0]).result(60) is not made[0]
    assert matchers.start_matcher(grammars[-1]).result(60) is made[-1]
    matchers.end_threads()


def test_a_grammar_that_cannot_be_made_fails_its_future(matchers: Matchers) -> None:
    with pytest.raises(GrammarError, match="nonsense"):
        matchers.start_matcher("start: nonsense").result(60)


def test_a_tokenizer_with_more_tokens_than_logits_allows_none_beyond(tokenizer: Tokenizer) -> None:
    matchers = Matchers(tokenizer, 512, [1])
    bits = np.full(16, 2**32 - 1, np.uint32)
    matchers.start_matcher("start: /(.|\\n)*/").result(60).apply_mask(bits)
    assert bits.any()
    matchers.end_threads()


def test_a_vocabulary_is_read_once_and_only_for_a_grammar_or_when_asked_to(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], module.vocabulary
    monkeypatch.setattr(module, "vocabulary", lambda *arguments: read.append(1) or real(*arguments))
    for warm in (False, True):
        matchers, before = Matchers(tokenizer, WIDTH, EOS), len(read)
        if warm:
            assert matchers.start_vocabulary() is matchers.start_vocabulary()
            matchers.start_vocabulary().result(60)
        assert len(read) - before == int(warm)
        grammar = LLMatcher.grammar_from_lark('start: "a"')
        waiting = [matchers.start_matcher(grammar) for _ in range(8)]  # more than there are threads
        assert all(one.result(60) for one in waiting)
        assert len(read) - before == 1
        matchers.end_threads()
