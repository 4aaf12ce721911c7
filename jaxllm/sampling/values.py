"""Values of sampling options: an entry of the table, and checks of values against it. Imports no
jax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from jaxllm.grammar.structure import KINDS, StructuredOutputsParams, StructureError, structure

MAX_STOP_CHARS = 1024
MAX_BAD_WORD_CHARS = 2**14  # of all words; the engine tokenises them between two steps
EXACT_FLOAT = 2.0**53  # every integer up to here is a float of its own
LARGEST_READ = 2**63  # JSON readers turn larger integers into floats


class OptionError(ValueError):
    """A sampling option has an illegal or unsupported value; `param` names it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Column:
    """The device column of an option: one number per slot, under the option's name. Of `process` it
    is field `NAME_Q` of `sampling.process.ProcessRows`.

    Attributes:
        dtype: np.float32 or np.int32.
        encode: the option's value to the column's.
    """

    dtype: type
    encode: Callable[[Any], float]


@dataclass(frozen=True, slots=True)
class DrawColumn(Column):
    """A column that the draw reads: field `NAME_B` of `pallas_kernels.draw.DrawRows`.

    Attributes:
        filters: the option excludes tokens, unless its value is neutral.
    """

    filters: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One entry of the table.

    Attributes:
        form: float, int, bool, strings (or one), texts (strings in a list), ints, biases (token
            ids with numbers), processors, arguments, structure (grammar.structure) or stopping
            (true, false or "never").
        low: the least number; excluded with `open_low`.
        high: the greatest number.
        max_items: of a list.
        low_items: the least items of a list.
        also: legal values outside the range, such as top_k = -1.
        neutral: values without effect.
        column: where programs read it, if it is one number.
    """

    form: str
    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    nullable: bool = False
    max_items: int = 0
    low_items: int = 0
    also: tuple[Any, ...] = ()
    neutral: tuple[Any, ...] = ()
    column: Column | None = None


def legal(row: Option) -> str:
    """The legal values of one option, in words."""
    if row.form == "biases":
        return f"{row.low:g} to {row.high:g}, up to {row.max_items}"
    if row.low is not None and row.high is not None:
        if row.high >= 2**31 - 1:
            high = ""
        else:
            high = f"{row.high:g}"
        if abs(row.low) < 2**31:
            low = f"{'>' if row.open_low else '≥'} {row.low:g}"
        elif abs(row.low) > 2**31:
            low = "64-bit integer"
        else:
            low = "32-bit integer"
        return ", ".join(
            [low + (f", ≤ {high}" if high else ""), *(f"or {value}" for value in row.also)]
        )
    if row.form == "structure":
        return "one of " + ", ".join(KINDS)
    if row.form in ("strings", "texts", "ints", "processors", "arguments"):
        return f"up to {row.max_items}"
    return {"bool": "true, false", "stopping": "true, false, never"}.get(row.form, row.form)


def checked(name: str, row: Option, value: Any) -> Any:
    """`value`, which is not None, with Python's own numbers and lists. Raises `OptionError`."""
    return _CHECKS[row.form](name, row, value)


def _number(value: Any) -> int | float | None:
    """A number as Python's own; None for anything else, such as true and "5"."""
    if type(value) in (int, float):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return None


def _truth(value: Any) -> bool | None:
    """True or false as Python's own; None for anything else, such as 1 and "true"."""
    if isinstance(value, bool):
        return value
    dtype_kind = getattr(getattr(value, "dtype", None), "kind", None)
    ndim = getattr(value, "ndim", None)
    if dtype_kind == "b" and ndim == 0:
        return bool(value)
    return None


def _items(value: Any) -> list[Any] | None:
    """A list, tuple, set or 1-D array as a list; None for anything else."""
    if isinstance(value, (list, tuple, set, frozenset, range)):
        if not isinstance(value, list):
            return list(value)
        return value
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        return value.tolist()
    return None


def plain(bound: float | None) -> str:
    """A bound in decimal, whole numbers with all their digits."""
    if bound is None:
        return ""
    if bound == int(bound):
        return str(int(bound))
    return f"{bound:g}"


def _bounded(name: str, row: Option, value: float) -> None:
    if value in row.also:
        return
    low_ok = row.low is None or (value > row.low if row.open_low else value >= row.low)
    if not low_ok or (row.high is not None and value > row.high):
        # An int of JSON can have thousands of digits
        _outside(name, row, str(value) if abs(value) < 2**65 else "a larger number")


def _outside(name: str, row: Option, got: str) -> NoReturn:
    bracket = "(" if row.open_low else "["
    extra = "".join(f" or {x}" for x in row.also)
    raise OptionError(
        name, f"{name} must be in {bracket}{plain(row.low)}, {plain(row.high)}]{extra}, got {got}"
    )


def _float(name: str, row: Option, value: Any) -> float:
    number = _number(value)
    if number is None:
        raise OptionError(name, f"{name} must be a number, got {type(value).__name__}")
    # An int may be too large for isfinite
    if isinstance(number, float) and not math.isfinite(number):
        raise OptionError(name, f"{name} must be finite, got {number}")
    _bounded(name, row, number)
    return float(number)


def _int(name: str, row: Option, value: Any) -> int:
    number = _number(value)
    if isinstance(number, float) and abs(number) >= LARGEST_READ and math.isfinite(number):
        # An integer that the JSON reader rounded, perhaps to a bound; it is out of range here too
        if number > 2**65:
            beyond = "a larger number"
        else:
            beyond = str(int(number))
        _outside(name, row, "a lower number" if number < 0 else beyond)
    if isinstance(number, float) and abs(number) > EXACT_FLOAT:
        raise OptionError(
            name,
            f"{name} must be an integer; got the float {number:g}, and floats above 2^53 are not "
            "exact: send all digits, without a point or an exponent",
        )
    if not isinstance(number, int):
        raise OptionError(name, f"{name} must be an integer, got {type(value).__name__}")
    _bounded(name, row, number)
    return number


def _bool(name: str, row: Option, value: Any) -> bool:
    truth = _truth(value)
    if truth is None:
        raise OptionError(name, f"{name} must be true or false, got {type(value).__name__}")
    return truth


def _strings(name: str, row: Option, value: Any) -> Any:
    items = [value] if isinstance(value, str) else _items(value)
    if items is not None and len(items) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} strings, got {len(items)}")
    if items is None or not all(isinstance(x, str) for x in items):
        raise OptionError(
            name,
            f"{name} must be a {'string or a ' if row.form == 'strings' else ''}list of strings",
        )
    for text in items:
        if not text or len(text) > MAX_STOP_CHARS:
            raise OptionError(
                name,
                f"each string of {name} must have 1 to {MAX_STOP_CHARS} characters, "
                f"got {len(text)}",
            )
    if isinstance(value, str):
        return value
    return items


def _structure(name: str, row: Option, value: Any) -> StructuredOutputsParams:
    try:
        return structure(value)
    except StructureError as error:
        raise OptionError(name, f"{name}: {error}") from None


def _texts(name: str, row: Option, value: Any) -> Any:
    if isinstance(value, str) or _items(value) is None:
        raise OptionError(name, f"{name} must be a list of strings, got {type(value).__name__}")
    texts = _strings(name, row, value)
    if (chars := sum(map(len, texts))) > MAX_BAD_WORD_CHARS:
        raise OptionError(
            name, f"{name} takes at most {MAX_BAD_WORD_CHARS} characters together, got {chars}"
        )
    return texts


def _ints(name: str, row: Option, value: Any) -> list[int]:
    items = _items(value)
    if items is None:
        raise OptionError(name, f"{name} must be a list of integers")
    if len(items) > row.max_items:  # first: the checks below take time in proportion
        raise OptionError(name, f"{name} takes at most {row.max_items} ids, got {len(items)}")
    if not set(map(type, items)) <= {int}:  # lists may be long, and true is no id
        items = [_whole(name, item) for item in items]
    unique = list(dict.fromkeys(items))
    if len(unique) < row.low_items:
        raise OptionError(
            name, f"{name} must hold at least {row.low_items}; leave it out to ask for nothing"
        )
    for x in (min(unique, default=0), max(unique, default=0)):
        if not 0 <= x < 2**31:
            got = x if abs(x) < 2**65 else "a larger number"
            raise OptionError(name, f"{name} holds {got}, which is not a token id")
    return unique


def _whole(name: str, value: Any) -> int:
    """A token id of another type than int. Raises OptionError."""
    number = _number(value)
    if isinstance(number, int) or (number is not None and LARGEST_READ <= abs(number) < math.inf):
        return int(number)
    raise OptionError(name, f"{name} must be a list of integers")


def _biases(name: str, row: Option, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise OptionError(name, f"{name} must map token ids to numbers, got {type(value).__name__}")
    if len(value) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} token ids, got {len(value)}")
    biases = {_token_id(name, key): _bias(name, row, key, bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise OptionError(name, f"{name} names a token id twice")
    return biases


def _bias(name: str, row: Option, key: Any, value: Any) -> float:
    try:
        return _float(f"{name}[{key!r:.20}]", row, value)
    except OptionError as error:
        raise OptionError(name, str(error)) from None


def _token_id(name: str, key: Any) -> int:
    """The token id of a key of a dict or JSON object. Raises OptionError."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        key = int(key)
    id = _number(key)
    if not isinstance(id, int) or not 0 <= id < 2**31:
        raise OptionError(name, f"{name} names {key!r:.20}, which is not a token id")
    return id


def _processors(name: str, row: Option, value: Any) -> list[Any]:
    items = _items(value)
    if items is None or not all(isinstance(x, str) or callable(x) for x in items):
        raise OptionError(name, f"{name} must be a list of names of processors, or of functions")
    if len(items) > row.max_items:
        raise OptionError(
            name, f"{name} takes at most {row.max_items} processors, got {len(items)}"
        )
    return items


def _arguments(name: str, row: Option, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OptionError(name, f"{name} must map names to numbers or lists of numbers")
    if len(value) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} arguments, got {len(value)}")
    return {key: _argument(name, key, argument) for key, argument in value.items()}


def _argument(name: str, key: str, value: Any) -> Any:
    items = _items(value) or [value]
    numbers = [_number(item) for item in items]
    if any(number is None or not abs(number) < 2**64 for number in numbers):
        raise OptionError(name, f"{name}[{key!r:.20}] must be a finite number or a list of them")
    if items[0] is not value:
        return numbers
    return numbers[0]


def _stopping(name: str, row: Option, value: Any) -> bool | str:
    if isinstance(value, str) and value == "never":
        return "never"
    if (truth := _truth(value)) is not None:
        return truth
    raise OptionError(name, f'{name} must be true, false or "never", got {type(value).__name__}')


_CHECKS = {
    "float": _float,
    "stopping": _stopping,
    "int": _int,
    "bool": _bool,
    "strings": _strings,
    "texts": _texts,
    "ints": _ints,
    "structure": _structure,
    "biases": _biases,
    "processors": _processors,
    "arguments": _arguments,
}
