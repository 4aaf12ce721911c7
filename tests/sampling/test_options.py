"""The table of sampling options: what it accepts, what it refuses, and that a refusal names the
option."""

import dataclasses

import numpy as np
import pytest

from jaxllm.sampling.options import (
    MAX_ARGUMENTS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_PROCESSORS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    OPTIONS,
    SamplingParams,
    default_of,
)
from jaxllm.sampling.values import MAX_STOP_CHARS, OptionError, checked

NUMBERS = [name for name in OPTIONS if OPTIONS[name].form in ("int", "float")]
NAN, INF = float("nan"), float("inf")


def refused(name, value) -> str:
    """The message with which a value is refused; it must be this option's refusal."""
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    return str(caught.value)


ACCEPTED = [
    ("n", 1),
    ("n", 128),
    ("temperature", 0),
    ("temperature", 2),
    ("top_p", 1e-9),
    ("top_p", 1),
    ("top_k", 0),
    ("top_k", -1),
    ("top_k", 2**31 - 1),
    ("min_p", 0),
    ("min_p", 1.0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("ignore_eos", True),
    ("truncate_prompt_tokens", -1),
    ("truncate_prompt_tokens", 1),
    ("include_stop_str_in_output", True),
    ("spaces_between_special_tokens", False),
    ("stop", []),
    ("stop", "x"),
    ("stop", ["x"] * MAX_STOP_STRINGS),
    ("stop", "x" * MAX_STOP_CHARS),
    ("stop_token_ids", [0, 2**31 - 1]),
    ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS))),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("presence_penalty", -2),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 1e-3),
    ("repetition_penalty", 1000),
    ("logit_bias", {}),
    ("logit_bias", {0: -100, 2**31 - 1: 100.0}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 0.5)),
    ("allowed_token_ids", [0]),
    ("allowed_token_ids", list(range(200_000))),
    ("bad_words", []),
    ("bad_words", ["x"] * MAX_BAD_WORDS),
    ("logits_processors", []),
    ("logits_processors", ["x"] * MAX_PROCESSORS),
    ("logits_processors", [max]),
    ("extra_args", {}),
    ("extra_args", {"a": 1, "b": [0.5, -2]}),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=str)
def test_values_at_the_borders_are_accepted(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


REFUSED = [
    ("n", 0, "[1, 128]"),
    ("n", 129, "[1, 128]"),
    ("temperature", -0.01, "[0, 2]"),
    ("temperature", 2.01, "[0, 2]"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", -0.5, "(0, 1]"),
    ("top_p", 1.0001, "(0, 1]"),
    ("top_k", -2, "or -1"),
    ("top_k", 2**31, "or -1"),
    ("min_p", -1e-9, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("seed", 2**63, "got 9223372036854775808"),
    ("seed", -(2**63) - 1, "got -9223372036854775809"),
    ("max_tokens", 0, "[1, "),
    ("max_tokens", 2**31, "[1, "),
    ("min_tokens", -1, "[0, "),
    ("logprobs", -2, "or -1"),
    ("prompt_logprobs", -2, "or -1"),
    ("truncate_prompt_tokens", 0, "or -1"),
    ("truncate_prompt_tokens", -2, "or -1"),
    ("presence_penalty", 2.01, "[-2, 2]"),
    ("presence_penalty", -2.1, "[-2, 2]"),
    ("frequency_penalty", -2.01, "[-2, 2]"),
    ("repetition_penalty", 0, "[0.001, 1000]"),
    ("repetition_penalty", -1, "[0.001, 1000]"),
    ("repetition_penalty", 1e-30, "[0.001, 1000]"),
]


@pytest.mark.parametrize(("name", "value", "limit"), REFUSED, ids=str)
def test_values_beyond_the_borders_are_refused_with_the_limit(name, value, limit):
    assert limit in refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, "1", [1], {}])
def test_a_number_is_neither_a_bool_nor_a_string(name, value):
    assert f"got {type(value).__name__}" in refused(name, value)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite(name, value):
    refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["huge", "hugely negative"])
def test_a_number_of_thousands_of_digits_is_refused_shortly(name, value):
    assert "got a larger number" in refused(name, value)


@pytest.mark.parametrize("name", [name for name in NUMBERS if OPTIONS[name].form == "int"])
def test_an_integer_option_takes_no_fraction(name):
    assert "must be an integer, got float" in refused(name, 1.0)


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].form == "bool"])
@pytest.mark.parametrize("value", [0, 1, "true"])
def test_a_flag_is_true_or_false(name, value):
    assert "true or false" in refused(name, value)


@pytest.mark.parametrize("name", OPTIONS)
def test_null_asks_for_nothing(name):
    got = getattr(SamplingParams(**{name: None}), name)
    assert got == (None if OPTIONS[name].nullable else default_of(name))


def test_null_max_tokens_means_as_many_as_the_model_allows():
    assert SamplingParams().max_tokens == 16
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"best_of": 0}, "in [1, 128], got 0"),
        ({"best_of": 129}, "in [1, 128], got 129"),
        ({"best_of": True}, "must be an integer"),
        ({"best_of": 2, "n": 3}, "best_of (2) must be at least n (3)"),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 at temperature 0"),
    ],
)
def test_best_of_is_at_least_n_and_needs_draws(options, says):
    with pytest.raises(OptionError) as error:
        SamplingParams(**options)
    assert error.value.param == "best_of" and says in str(error.value)


def test_samples_are_best_of_or_n():
    assert [
        SamplingParams(n=2).samples,
        SamplingParams(n=2, best_of=5).samples,
        SamplingParams(best_of=1, temperature=0).samples,
    ] == [
        2,
        5,
        1,
    ]


def test_the_neutral_values_that_clients_send_are_accepted():
    SamplingParams(
        repetition_penalty=1.0,
        presence_penalty=0,
        frequency_penalty=0.0,
        best_of=1,
        logit_bias={},
        bad_words=[],
        priority=0,
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("stop", 5, "a string or a list of strings"),
        ("stop", ["a", 5], "a string or a list of strings"),
        ("stop", "", "1 to 1024 characters, got 0"),
        ("stop", ["a", "x" * (MAX_STOP_CHARS + 1)], "1 to 1024 characters, got 1025"),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1), "at most 16 strings, got 17"),
        ("stop_token_ids", 5, "a list of integers"),
        ("stop_token_ids", [1, True], "a list of integers"),
        ("stop_token_ids", [1, 2.0], "a list of integers"),
        ("stop_token_ids", [-1], "holds -1, which is not a token id"),
        ("stop_token_ids", [2**31], "which is not a token id"),
        ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS + 1)), "at most 64 ids, got 65"),
        ("allowed_token_ids", [], "at least 1"),
        ("allowed_token_ids", [-1], "holds -1, which is not a token id"),
        ("allowed_token_ids", "5", "a list of integers"),
        ("structured_outputs", {}, "structured_outputs: exactly one of json"),
        ("structured_outputs", {"json": {}, "regex": "a"}, "got json and regex"),
        ("structured_outputs", "a", "must be an object"),
        ("guided_decoding", {"regex": ""}, "guided_decoding: regex is empty"),
        ("bad_words", "x", "must be a list of strings, got str"),
        ("bad_words", [""], "1 to 1024 characters, got 0"),
        ("bad_words", ["x"] * (MAX_BAD_WORDS + 1), "at most 256 strings, got 257"),
        ("bad_words", ["x" * 1000] * 17, "at most 16384 characters together, got 17000"),
        ("logits_processors", "x", "a list of names of processors, or of functions"),
        ("logits_processors", [1], "a list of names of processors, or of functions"),
        ("logits_processors", ["x"] * (MAX_PROCESSORS + 1), "at most 16 processors, got 17"),
        ("extra_args", [1], "must map names to numbers"),
        ("extra_args", {1: 1}, "must map names to numbers"),
        ("extra_args", {"a": True}, "extra_args['a'] must be a finite number"),
        ("extra_args", {"a": NAN}, "extra_args['a'] must be a finite number"),
        ("extra_args", {"a": [1, "2"]}, "extra_args['a'] must be a finite number"),
        ("extra_args", {"a": []}, "extra_args['a'] must be a finite number"),
        (
            "extra_args",
            {str(i): 1 for i in range(MAX_ARGUMENTS + 1)},
            "at most 256 arguments, got 257",
        ),
        ("logit_bias", [1], "must map token ids to numbers, got list"),
        ("logit_bias", {"a": 1}, "names 'a', which is not a token id"),
        ("logit_bias", {"-1": 1}, "names '-1', which is not a token id"),
        ("logit_bias", {-1: 1}, "names -1, which is not a token id"),
        ("logit_bias", {"1.5": 1}, "names '1.5', which is not a token id"),
        ("logit_bias", {"\u0665": 1}, "which is not a token id"),
        ("logit_bias", {"9" * 5000: 1}, "which is not a token id"),
        ("logit_bias", {True: 1}, "names True, which is not a token id"),
        ("logit_bias", {2**31: 1}, "which is not a token id"),
        ("logit_bias", {"5": NAN}, "logit_bias['5'] must be finite"),
        ("logit_bias", {"5": 1e39}, "logit_bias['5'] must be in [-100, 100]"),
        ("logit_bias", {5: -101}, "logit_bias[5] must be in [-100, 100], got -101"),
        ("logit_bias", {5: "1"}, "logit_bias[5] must be a number, got str"),
        ("logit_bias", {"5": 1, "05": 1}, "names a token id twice"),
        (
            "logit_bias",
            dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
            "at most 1024 token ids, got 1025",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_stop_conditions_are_checked_item_by_item(name, value, says):
    assert says in refused(name, value)


def test_the_keys_of_biases_may_be_numbers_or_digits():
    assert SamplingParams(logit_bias={"7": 1, 8: -2}).logit_bias == {7: 1.0, 8: -2.0}


def test_repeated_stop_ids_count_once():
    assert SamplingParams(stop_token_ids=[3, 3, 1, 3]).stop_token_ids == [3, 1]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("seed", -(2.0**63), "got a lower number"),  # what -2**63 - 1 is read as
        ("seed", 2.0**63, "got 9223372036854775808"),
        ("seed", -1e30, "got a lower number"),
        ("seed", 2.0**64, "got 18446744073709551616"),
        ("seed", 1e30, "got a larger number"),
        ("max_tokens", 1e30, "got a larger number"),
        ("stop_token_ids", [1, 1e30], "holds a larger number, which is not a token id"),
        ("allowed_token_ids", [2.0**64], "holds 18446744073709551616, which is not a token id"),
        ("stop_token_ids", [1, np.array([1])], "a list of integers"),
        ("stop_token_ids", np.array([[1]]), "a list of integers"),
    ],
    ids=str,
)
def test_integers_that_json_readers_make_floats_of_are_too_large_and_nothing_else(
    name, value, says
):
    assert says in refused(name, value)


def test_a_list_that_is_too_long_is_refused_before_it_is_looked_at():
    class Ids(list):
        def __iter__(self):
            raise AssertionError("looked at")

    assert "takes at most 262144 ids, got 300000" in refused(
        "allowed_token_ids", Ids([1] * 300_000)
    )
    assert "takes at most 64 ids, got 65" in refused("stop_token_ids", Ids([1] * 65))
    assert "takes at most 256 strings" in refused("bad_words", Ids(["a"] * 257))


def test_min_tokens_is_at_most_max_tokens():
    with pytest.raises(
        OptionError, match=r"min_tokens \(5\) must be at most max_tokens \(4\)"
    ) as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=5000, max_tokens=None)


def test_values_are_stored_in_one_form():
    params = SamplingParams(temperature=1, stop="a")
    assert isinstance(params.temperature, float)
    assert params.stop_strings == ["a"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert SamplingParams().stop_strings == []


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_documented_and_its_default_is_legal(name):
    row = OPTIONS[name]
    assert row.doc.endswith(".")
    default = default_of(name)
    if default is None:
        assert row.nullable
    else:  # `SamplingParams` does not check it
        found = checked(name, row, default)
        assert found == default and type(found) is type(default)
    assert {f.name for f in dataclasses.fields(SamplingParams)} == set(OPTIONS)


def test_options_are_given_by_name_and_unknown_ones_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(1)
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
