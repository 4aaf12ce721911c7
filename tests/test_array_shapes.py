"""The checker of shape suffixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.array_shapes import axes_of, checked, problems


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("q_TNH", ["T", "N", "H"]),
        ("_rows_R", ["R"]),
        ("weight_X2FD", ["X", "2", "F", "D"]),
        ("scales_K16", ["K", "16"]),
        ("inv_freq_F", ["F"]),
        ("x", None),
        ("layer_0", None),
        ("MAX_T", None),
        ("kv_heads", None),
    ],
)
def test_a_suffix_names_an_axis_with_each_letter_or_number(
    name: str, axes: list[str] | None
) -> None:
    assert axes_of(name) == axes


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ({"x_TD": (3, 4), "y_TD": (3, 4), "w_D": (4,), "z": (7,)}, []),
        ({"x_TD": (3, 4, 5)}, ["x_TD has shape (3, 4, 5)"]),
        ({"x_TD": (3, 4), "w_D": (5,)}, ["w_D has D = 5, x_TD has 4"]),
        ({"w_X2F": (3, 1, 4)}, ["w_X2F has 2 = 1, a digit has 2"]),
        ({"x_TT": (3, 4)}, ["x_TT has T = 4, x_TT has 3"]),
    ],
)
def test_arrays_that_break_their_promise_are_named(
    shapes: dict[str, tuple[int, ...]], found: list[str]
) -> None:
    assert problems({name: np.zeros(shape) for name, shape in shapes.items()}) == found


def test_what_has_no_shape_is_left_out() -> None:
    assert problems({"x_TD": None, "y_T": 3, "z_TD": [1, 2]}) == []


def product(x_TD: np.ndarray, w_FD: np.ndarray) -> np.ndarray:
    y_TF = x_TD @ w_FD.T
    return y_TF


def mistaken(x_TD: np.ndarray) -> np.ndarray:
    y_DT = x_TD
    return y_DT


@dataclass
class Batch:
    token_T: Any
    position_T: Any


def test_arguments_and_locals_of_every_call_are_checked() -> None:
    with checked(__name__) as seen:
        product(np.zeros((3, 4)), np.zeros((5, 4)))
        product(np.zeros((2, 4)), np.zeros((5, 4)))  # another call, another T
    assert seen == {"x_TD": 2, "w_FD": 2, "y_TF": 2}
    with pytest.raises(AssertionError, match="mistaken: y_DT has D = 3, x_TD has 4"):
        with checked(__name__):
            mistaken(np.zeros((3, 4)))


def test_fields_of_a_dataclass_agree_with_each_other() -> None:
    def told(batch: Batch, x_T: np.ndarray) -> None:
        pass

    batch, other = Batch(np.zeros(3), np.zeros(3)), Batch(np.zeros(3), np.zeros(4))
    with checked(__name__) as seen:
        told(batch, np.zeros(4))
    assert seen["token_T"] == seen["x_T"] == 1
    with pytest.raises(AssertionError, match="told: position_T has T = 4, token_T has 3"):
        with checked(__name__):
            told(other, np.zeros(4))


def test_other_modules_are_left_alone_and_nothing_is_checked_afterwards() -> None:
    with checked("tests.array_shapes", "numpy") as seen:
        mistaken(np.zeros((3, 4)))
    mistaken(np.zeros((3, 4)))
    assert "x_TD" not in seen
