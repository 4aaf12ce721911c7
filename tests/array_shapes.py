"""Checks the shape suffixes of names while code runs: `q_TNH` has three axes, and within a call and
within a dataclass equal letters are equal sizes.

    with checked("jaxllm.nn") as seen:
        model(token_T, position_T, context)
    assert seen["x_TD"]

A digit is a size: `weight_X2FD` has 2 on its second axis. Arguments and local variables are looked
at when a function of these modules returns, whether it runs on arrays or is traced.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SUFFIX = re.compile(r"_*[a-z][a-z0-9_]*_(?=\d*[A-Z])([A-Z0-9]+)")
AXIS = re.compile(r"[A-Z]|\d+")


def axes_of(name: str) -> list[str] | None:
    """The axes that a name promises, None when it has no suffix."""
    found = SUFFIX.fullmatch(name)
    return AXIS.findall(found[1]) if found else None


def problems(values: Mapping[str, Any]) -> list[str]:
    """Every name that does not have the axes of its suffix, and every letter of two sizes."""
    found: list[str] = []
    sizes: dict[str, tuple[int, str]] = {}
    for name, axes, shape in promised(values):
        if len(axes) != len(shape):
            found.append(f"{name} has shape {shape}")
            continue
        for axis, size in zip(axes, shape, strict=True):
            expected, first = (
                sizes.setdefault(axis, (int(axis), "a digit"))
                if axis.isdigit()
                else (sizes.setdefault(axis, (size, name)))
            )
            if size != expected:
                found.append(f"{name} has {axis} = {size}, {first} has {expected}")
    return found


def promised(values: Mapping[str, Any]) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """The arrays among values whose names have a suffix: name, axes, shape."""
    for name, value in values.items():
        axes, shape = axes_of(name), getattr(value, "shape", None)
        if axes is not None and isinstance(shape, tuple):
            yield name, axes, shape


@contextmanager
def checked(*modules: str) -> Iterator[Counter[str]]:
    """Check every call of these modules, and of those below them, on this thread.

    Yields how often each name was checked. Raises AssertionError at the end with all problems.
    """
    seen: Counter[str] = Counter()
    wrong: dict[str, None] = {}

    def look(frame: types.FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "return" or not any(f"{module}.".startswith(f"{m}.") for m in modules):
            return
        scopes = [dict(frame.f_locals)]
        scopes += [vars(value) for value in scopes[0].values() if is_record(value)]
        for values in scopes:
            seen.update(name for name, *_ in promised(values))
            where = f"{module}:{frame.f_code.co_qualname}"
            wrong.update(dict.fromkeys(f"{where}: {each}" for each in problems(values)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)
    assert not wrong, "\n".join(wrong)


def is_record(value: object) -> bool:
    """Whether a value is an instance of a dataclass with attributes of its own."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and hasattr(value, "__dict__")
    )
