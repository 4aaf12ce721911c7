"""Logits processors of research code: JAX functions that are traced into `process` and enabled
request by request.

    def cooler(logits_SV, state, *, after=8, factor=2.0):
        generated_S = state.position_S - state.prompt_length_S
        return jnp.where((generated_S >= after)[:, None], logits_SV * factor[:, None], logits_SV)

    llm = LLM("demo", logits_processors=[cooler])
    llm.generate("Once", SamplingParams(logits_processors=["cooler"], extra_args={"factor": 3.0}))

Keyword-only parameters are arguments that a request sets by `extra_args`. Their defaults, numbers
or tuples of numbers, give an argument's length. It arrives as float32 `[S]` or `[S, n]`, one row
per request of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.config import ConfigError
from jaxllm.sampling.processor_arguments import Function, Processor, length_of, processors_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessorState:
    """What a processor may read, besides the logits, of the S rows of a step. Each row is a request
    of its own. Nothing here depends on batching or preemption.

    Attributes:
        counts_SV: uint16; how often the output has each token.
        prompt_SV: bool; whether the prompt has it.
        position_S: int32; of the token to be drawn, in the whole sequence.
        prompt_length_S: int32; tokens.
    """

    counts_SV: Array
    prompt_SV: Array
    position_S: Array
    prompt_length_S: Array


def apply_processor(
    processor: Processor, logits_SV: Array, state: ProcessorState, custom_SC: Array
) -> Array:
    """`logits_SV` after a processor, in rows of `custom_SC` that enable it."""
    column = processor.start + 1
    arguments = {}
    for name, default in processor.defaults:
        length = length_of(default)
        if isinstance(default, tuple):
            arguments[name] = custom_SC[:, column : column + length]
        else:
            arguments[name] = custom_SC[:, column]
        column += length
    found_SV = processor.function(logits_SV, state, **arguments)
    return jnp.where(custom_SC[:, processor.start, None] != 0, found_SV, logits_SV)


def read_processors(functions: Sequence[Function], vocab_size: int) -> tuple[Processor, ...]:
    """The processors of an engine. Raises ConfigError where a function does not map logits and
    state to logits."""
    processors = processors_of(functions)
    for processor in processors:
        _trace(processor, vocab_size)
    return processors


def _trace(processor: Processor, vocab_size: int) -> None:
    """Trace a processor once, so that its faults show at start."""
    rows = 2
    shape = jax.ShapeDtypeStruct
    logits = shape((rows, vocab_size), jnp.float32)
    words = shape((rows, vocab_size), jnp.bool_)
    ints = shape((rows,), jnp.int32)
    state = ProcessorState(shape((rows, vocab_size), jnp.uint16), words, ints, ints)
    custom = shape((rows, processor.start + processor.width), jnp.float32)
    try:
        traced = jax.eval_shape(
            lambda *arguments: apply_processor(processor, *arguments), logits, state, custom
        )
    except Exception as error:
        raise ConfigError(
            f"{processor.name} of logits_processors cannot be traced: "
            f"{type(error).__name__}: {error}"
        ) from error
    if (traced.shape, traced.dtype) != (logits.shape, logits.dtype):
        raise ConfigError(
            f"{processor.name} of logits_processors makes {traced.dtype}{list(traced.shape)} of "
            f"{logits.dtype}{list(logits.shape)}; it must keep shape and dtype"
        )
