"""Weights of every kind are called as `Weight` says. Types cannot tell: modules are of any type."""

from __future__ import annotations

import inspect

import pytest

from jaxllm.nn.weight.apart import Apart
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.int4 import Int4
from jaxllm.nn.weight.protocol import Weight
from jaxllm.nn.weight.reordered import Reordered
from jaxllm.nn.weight.scaled import Scaled

METHODS = ("rounding", "product", "part", "gated", "rules")


@pytest.mark.parametrize("kind", [Apart, Dense, Int4, Reordered, Scaled])
@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_parameters_of_the_protocol(kind: type, method: str) -> None:
    wanted = inspect.signature(getattr(Weight, method)).parameters
    assert list(inspect.signature(getattr(kind, method)).parameters) == list(wanted)
