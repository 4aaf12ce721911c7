"""Logits processors of research code: JAX functions that are traced into `process`, and enabled
request by request.

    def cooler(logits_SV, state, *, after=8, factor=2.0):
        output = state.position_S - state.prompt_length_S  # tokens said so far
        return jnp.where((output >= after)[:, None], logits_SV * factor[:, None], logits_SV)

    llm = LLM("demo", logits_processors=[cooler])
    llm.generate("Once", SamplingParams(logits_processors=["cooler"], extra_args={"factor": 3.0}))

Keyword-only parameters are arguments that a request may set by `extra_args`. Their defaults,
numbers or tuples of numbers, say how many numbers an argument is; it arrives as float32 `[S]` or
`[S, n]`, a row per request of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.config import ConfigError

type Function = Callable[..., Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """What a processor may know of the S rows of a step, each a request of its own. Nothing here
    depends on batching or preemption."""

    counts_SV: Array  # uint16: how often the output has each token
    prompt_SV: Array  # bool: the prompt has it
    position_S: Array  # int32: of the token to be drawn, in the whole sequence
    prompt_length_S: Array  # int32


@dataclass(frozen=True)
class Processor:
    """A function, its arguments' defaults in order, and where its numbers lie in a row of
    `LogitsParams.custom`: first whether it is enabled."""

    name: str
    function: Function
    defaults: tuple[tuple[str, float | tuple[float, ...]], ...]
    start: int

    @property
    def width(self) -> int:
        """How many numbers of a row are its own."""
        return 1 + sum(_length(default) for _, default in self.defaults)

    def __call__(self, logits_SV: Array, state: ProcessorState, custom_SC: Array) -> Array:
        """The logits as the function makes them, in rows where it is enabled."""
        at, arguments = self.start + 1, {}
        for name, default in self.defaults:
            length = _length(default)
            arguments[name] = (
                custom_SC[:, at : at + length] if isinstance(default, tuple) else custom_SC[:, at]
            )
            at += length
        found_SV = self.function(logits_SV, state, **arguments)
        return jnp.where(custom_SC[:, self.start, None] != 0, found_SV, logits_SV)


def read_processors(functions: Sequence[Function], vocab_size: int) -> tuple[Processor, ...]:
    """The processors of an engine. Raises ConfigError on what is no function of logits and state
    that gives logits."""
    found: list[Processor] = []
    for function in functions:
        name = getattr(function, "__name__", None)
        if not callable(function) or not isinstance(name, str):
            raise ConfigError(
                f"logits_processors must hold functions with names, got {type(function).__name__}"
            )
        if any(name == other.name for other in found):
            raise ConfigError(f"logits_processors holds two functions named {name}")
        start = found[-1].start + found[-1].width if found else 0
        found.append(Processor(name, function, _defaults(name, function), start))
        _check(found[-1], vocab_size)
    return tuple(found)


def custom_width(processors: Sequence[Processor]) -> int:
    """Columns of `LogitsParams.custom`; one at least."""
    return max(1, sum(processor.width for processor in processors))


def custom_of(
    processors: Sequence[Processor], enabled: Sequence[str], arguments: Mapping[str, Any]
) -> np.ndarray:
    """A row of `LogitsParams.custom`."""
    row = np.zeros(custom_width(processors), np.float32)
    for processor in processors:
        numbers = [
            [float(processor.name in enabled)],
            *(np.atleast_1d(arguments.get(name, value)) for name, value in processor.defaults),
        ]
        row[processor.start : processor.start + processor.width] = np.concatenate(numbers)
    return row


def _defaults(name: str, function: Function) -> tuple[tuple[str, float | tuple[float, ...]], ...]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        default = parameter.default
        numbers = default if isinstance(default, tuple) and default else (default,)
        if any(
            isinstance(number, bool) or not isinstance(number, (int, float)) for number in numbers
        ):
            raise ConfigError(
                f"{name} of logits_processors: the default of {parameter.name} must be a number or a tuple of numbers"
            )
        found.append((parameter.name, default))
    return tuple(found)


def _check(processor: Processor, vocab_size: int) -> None:
    """Trace the function once, so that what is wrong with it is said at start."""
    rows = 2
    shape = jax.ShapeDtypeStruct
    logits, words = shape((rows, vocab_size), jnp.float32), shape((rows, vocab_size), jnp.bool_)
    ints = shape((rows,), jnp.int32)
    state = ProcessorState(shape((rows, vocab_size), jnp.uint16), words, ints, ints)
    try:
        found = jax.eval_shape(
            processor, logits, state, shape((rows, processor.start + processor.width), jnp.float32)
        )
    except Exception as error:
        raise ConfigError(
            f"{processor.name} of logits_processors cannot be traced: {type(error).__name__}: {error}"
        ) from error
    if (found.shape, found.dtype) != (logits.shape, logits.dtype):
        raise ConfigError(
            f"{processor.name} of logits_processors makes {found.dtype}{list(found.shape)} of {logits.dtype}{list(logits.shape)}; "
            "it must keep shape and dtype"
        )


def _length(default: float | tuple[float, ...]) -> int:
    return len(default) if isinstance(default, tuple) else 1
