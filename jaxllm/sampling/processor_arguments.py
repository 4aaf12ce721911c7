"""Logits processors as the host sees them: names, arguments, columns. Imports no jax.

`sampling.processors` runs them on the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config import ConfigError

type Function = Callable[..., Any]
type Default = float | tuple[float, ...]


@dataclass(frozen=True)
class Processor:
    """A processor of the engine and its columns in `LogitsParams.custom`.

    Attributes:
        name: of the function, by which requests enable it.
        function: traced into `process`.
        defaults: of its keyword-only parameters, in order.
        start: its first column, which is 1 where the processor is enabled; arguments follow.
    """

    name: str
    function: Function
    defaults: tuple[tuple[str, Default], ...]
    start: int

    @property
    def width(self) -> int:
        """The number of columns that the processor takes: whether it runs, and its arguments."""
        return 1 + sum(length_of(default) for _, default in self.defaults)


def processors_of(functions: Sequence[Function]) -> tuple[Processor, ...]:
    """The processors of an engine, untraced. Raises ConfigError on an unnamed function, two of one
    name, or a default that is no number."""
    processors: list[Processor] = []
    for function in functions:
        name = getattr(function, "__name__", None)
        if not callable(function) or not isinstance(name, str):
            raise ConfigError(
                f"logits_processors must hold functions with names, got {type(function).__name__}"
            )
        if any(name == processor.name for processor in processors):
            raise ConfigError(f"logits_processors holds two functions named {name}")
        start = 0
        if processors:
            start = processors[-1].start + processors[-1].width
        processors.append(Processor(name, function, _defaults(name, function), start))
    return tuple(processors)


def custom_width(processors: Sequence[Processor]) -> int:
    """Columns of `LogitsParams.custom`; one at least."""
    return max(1, sum(processor.width for processor in processors))


def custom_of(
    processors: Sequence[Processor], enabled: Sequence[str], arguments: Mapping[str, Any]
) -> np.ndarray:
    """A float32 row of `LogitsParams.custom` for the processors and arguments of one request."""
    row = np.zeros(custom_width(processors), np.float32)
    for processor in processors:
        numbers = [
            [float(processor.name in enabled)],
            *(np.atleast_1d(arguments.get(name, value)) for name, value in processor.defaults),
        ]
        row[processor.start : processor.start + processor.width] = np.concatenate(numbers)
    return row


def length_of(default: Default) -> int:
    """How many numbers an argument has, by its default."""
    if isinstance(default, tuple):
        return len(default)
    return 1


def _defaults(name: str, function: Function) -> tuple[tuple[str, Default], ...]:
    defaults = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        default = parameter.default
        if isinstance(default, tuple) and default:
            numbers = default
        else:
            numbers = (default,)
        if any(
            isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers
        ):
            raise ConfigError(
                f"{name} of logits_processors: the default of {parameter.name} must be a number "
                "or a tuple of numbers"
            )
        defaults.append((parameter.name, default))
    return tuple(defaults)
