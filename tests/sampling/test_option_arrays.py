"""Sampling options given as numpy's numbers, arrays and tuples."""

import dataclasses

import numpy as np
import pytest

from jaxllm.sampling.options import OPTIONS, BeamSearchParams, SamplingParams
from jaxllm.sampling.values import OptionError
from tests.sampling.test_options import refused

NUMPYS = [
    ("seed", np.int64(-4), -4),
    ("seed", np.uint64(5), 5),
    ("temperature", np.float32(0.5), 0.5),
    ("top_k", np.int32(7), 7),
    ("presence_penalty", np.float64(-1), -1.0),
    ("stop", ("a", "b"), ["a", "b"]),
    ("stop", np.array(["a"]), ["a"]),
    ("bad_words", ("a",), ["a"]),
    ("stop_token_ids", (3, 1, 3), [3, 1]),
    ("stop_token_ids", {3}, [3]),
    ("allowed_token_ids", np.array([4, 5]), [4, 5]),
    ("allowed_token_ids", [np.int64(4), 5], [4, 5]),
    ("allowed_token_ids", range(3), [0, 1, 2]),
    ("logit_bias", {np.int64(4): np.float32(3)}, {4: 3.0}),
    ("ignore_eos", np.bool_(True), True),
    ("logits_processors", ("x", max), ["x", max]),
    (
        "extra_args",
        {"a": np.float32(2), "b": (1, np.int8(2)), "c": np.array([0.5])},
        {"a": 2.0, "b": [1, 2], "c": [0.5]},
    ),
]


@pytest.mark.parametrize(("name", "value", "plain"), NUMPYS, ids=str)
def test_numbers_and_lists_of_numpy_and_tuples_become_pythons_own(name, value, plain):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == plain and repr(got) == repr(plain)


@pytest.mark.parametrize("value", [np.bool_(True), np.array([1]), np.float32(1.5), np.str_("1")])
def test_what_is_no_whole_number_is_not_taken_for_one_in_numpy_either(value):
    assert "must be an integer" in refused("seed", value)


ARRAYS = [
    np.array([1, 2]),
    np.array([[1]]),
    np.array([]),
    np.array(1),
    np.array(["never", "x"]),
    np.array([None]),
    np.array([True, False]),
]
LISTS = [
    *((name, []) for name in ("stop", "stop_token_ids", "bad_words", "logits_processors")),
    *((name, [1, 2]) for name in ("stop_token_ids", "allowed_token_ids")),
    *((name, ["never", "x"]) for name in ("stop", "bad_words", "logits_processors")),
]


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_array_is_a_list_or_is_refused_by_name(name, value):
    options = {"use_beam_search": name in ("early_stopping", "length_penalty"), name: value}
    if (name, value.tolist()) in LISTS:
        assert getattr(SamplingParams(**options), name) == value.tolist()
    else:
        with pytest.raises(OptionError) as caught:
            SamplingParams(**options)
        assert caught.value.param == name and name in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BeamSearchParams)])
def test_an_array_in_beam_search_params_is_refused_by_name(field):
    with pytest.raises(OptionError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: np.array([1, 2])}).sampling()
    assert caught.value.param == field and field in str(caught.value)
