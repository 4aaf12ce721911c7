"""Bias, penalties, masks and research code over the logits of requests that use them."""

from __future__ import annotations

import functools

from jax import Array

from jaxllm.engine.runtime.program import (
    COUNTS,
    LOGITS_PARAMS,
    STATE,
    Program,
    Resident,
    Variant,
    always,
)
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    device_columns,
)
from jaxllm.sampling.process import LogitsParams, ProcessRows, process
from jaxllm.sampling.processor_arguments import Processor


def process_logits(
    processors: tuple[Processor, ...],
    forward_output: ForwardOutput,
    state: SlotState,
    counts: Array,
    logits_params: LogitsParams,
    reused: Array,
) -> tuple[Array, Array]:
    """(counts, processed logits); `reused` gives the buffer of the logits.

    Runs in every step in which a request that uses it emits, and in no other: it counts the token
    that the step before sampled for each decode row.
    """
    del reused
    slots = forward_output.slots
    now = device_columns(state.progress[slots], PROGRESS)
    params = device_columns(state.params[slots], SLOT_PARAMS)
    rows = ProcessRows(
        slot_Q=slots,
        active_Q=forward_output.emit & params["processed"],
        # A slot comes alive with its first token, which the prompt's last chunk samples
        drew_Q=forward_output.emit & now["alive"],
        token_Q=now["token"],
        position_Q=now["position"] + 1,
        prompt_length_Q=params["prompt_length"],
    )
    return process(forward_output.logits, rows, counts, logits_params, processors)


def _build(shapes: StepShapes, rows: int) -> Variant:
    logits = Resident("processed_logits", rows)
    return Variant(
        functools.partial(process_logits, shapes.model.processors),
        takes=(Resident("forward_output", rows), STATE, COUNTS, LOGITS_PARAMS, logits),
        gives=(COUNTS, logits),
    )


PROGRAM = Program(
    "process_logits",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.logits, reverse=True)],
    build=_build,
    rank=4,
    # Functions of research code have no name that lasts
    is_kept=lambda shapes: not shapes.model.processors,
    may_need_most=always,
)
