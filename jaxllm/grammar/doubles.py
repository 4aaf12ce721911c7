"""Finds numbers in a JSON schema that the compiler would round: it reads them as doubles, and
bounds of integers as 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from jaxllm.grammar.references import DEFINITIONS, NAMED_SCHEMAS

LARGEST = 2**53  # all whole numbers up to it are doubles
SHIFT = 22  # 10**22 is the largest power of ten that is a double
MOST = 2**63 - 1  # the compiler generates no larger number where there is a bound

HOLDS_VALUES = ("const", "enum")
ANNOTATIONS = ("default", "examples")  # restrict nothing
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
# Objects whose keys are no keywords
NAMES_SCHEMAS = (*NAMED_SCHEMAS, *DEFINITIONS)


def inexact(schema: Any) -> str | None:
    """The first keyword of a schema with a number that would be rounded, and the number; None where
    all are exact. An upper bound of 64-bit integers or more forbids nothing, so it counts as
    exact."""
    if not isinstance(schema, dict):
        if isinstance(schema, list):
            return next(filter(None, map(inexact, schema)), None)
        return None
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        if keyword in HOLDS_VALUES:
            wrong = next((number for number in _numbers(value) if not _exact(number)), None)
            reason = None
            if wrong is not None:
                reason = f"{keyword} holds {_shown(wrong)}"
        elif keyword in BOUNDS and _is_number(value):
            if _exact(value) or _idle(keyword, value):
                reason = None
            else:
                reason = f"{keyword} is {_shown(value)}"
        elif keyword in NAMES_SCHEMAS and isinstance(value, dict):
            reason = next(filter(None, map(inexact, value.values())), None)
        else:
            reason = inexact(value)
        if reason is not None:
            return reason
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    if _is_number(value):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _exact(number: int | float) -> bool:
    """Whether the number is exact when its digits are read as a whole number and scaled by a power
    of ten."""
    if isinstance(number, int) or abs(number) > LARGEST or number.is_integer():
        return abs(number) <= LARGEST
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return (
        int("".join(map(str, digits))) <= LARGEST
        and isinstance(exponent, int)
        and abs(exponent) <= SHIFT
    )


def _idle(keyword: str, bound: int | float) -> bool:
    """Whether a bound forbids nothing, since larger numbers are never generated."""
    return bound >= {"maximum": MOST, "exclusiveMaximum": MOST + 1}.get(keyword, math.inf)


def _shown(number: int | float) -> str:
    if isinstance(number, float) or abs(number) < 2**65:
        return repr(number)
    return "a larger number"
