"""Bias, penalties, masks and research code over the logits of requests that use them, and the
uploads of what these requests want."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import Layout, Shapes
from jaxllm.engine.runtime.program import (
    COUNTS,
    LOGITS_PARAMS,
    STATE,
    Program,
    Resident,
    Variant,
    always,
    never_first,
)
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    device_columns,
)
from jaxllm.engine.scheduling.request import Request
from jaxllm.sampling.bits import packed
from jaxllm.sampling.options import MAX_LOGIT_BIAS, PROCESS_COLUMNS, is_set
from jaxllm.sampling.process import LogitsParams, ProcessRows, process, set_slot_params
from jaxllm.sampling.processor_arguments import Processor, custom_of

OUTPUT_TOKENS = 1024  # tokens of an output that one call of `set_slot` takes
# Rows of one call of `apply_token_bitmask`; at a vocabulary of 152,064 they are 1.2 MB, 25 µs of a
# GPU's link
BITMASK_ROWS = 64

# Writes packed bits into `allowed_RW`; returns rows without tokens, with the reason
type Fill = Callable[[Sequence[Request], np.ndarray], list[tuple[int, str]]]


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
        **{f"{name}_Q": params[name] for name in PROCESS_COLUMNS},
    )
    return process(forward_output.logits, rows, counts, logits_params, processors)


def set_slot(
    layout: Layout, local: NamedSharding, counts: Array, params: LogitsParams, buffer: Array
) -> tuple[Array, LogitsParams, Array]:
    """(counts, parameters, a value that is there when `buffer` was read)."""
    new = layout.unpack(jax.device_put(buffer, local))
    return *set_slot_params(counts, params, new), new["slot"][0]


@functools.cache
def slot_layout(params: LogitsParams) -> Layout:
    """The buffer: one slot's row of each parameter, its number, tokens of its output, and whether
    they are the first ones."""
    rows: Shapes = {name: (s.shape[1:], np.dtype(s.dtype).type) for name, s in vars(params).items()}
    rows |= dict.fromkeys(("slot", "first"), ((1,), np.int32))
    return Layout(rows | {"said": ((OUTPUT_TOKENS,), np.int32)})


def pack_slot(request: Request, shapes: StepShapes) -> list[np.ndarray]:
    """Buffers of `set_slot` with what a request asks of tokens, its prompt and its output. They go
    before the first sampling of a request in its slot, newly admitted or back from preemption."""
    assert request.logits_options is not None
    params = request.params
    size = shapes.vocab_size
    enabled = [name for name in params.logits_processors or () if isinstance(name, str)]
    # Nothing else reads the prompt
    read = request.prompt.tokens if enabled or is_set(params, "repetition_penalty") else []
    arrays = {
        "slot": np.array([request.slot], np.int32),
        "prompt": packed(read, size),
        "allowed": request.logits_options.allowed_W,
        "custom": custom_of(shapes.model.processors, enabled, params.extra_args or {}),
    } | _bias_arrays(params.logit_bias or {}, size)
    layout = slot_layout(shapes.logits_params)
    buffers = []
    for first in range(0, max(1, len(request.output)), OUTPUT_TOKENS):
        said = request.output[first : first + OUTPUT_TOKENS]
        arrays["first"] = np.array([first == 0], np.int32)
        arrays["said"] = np.full(OUTPUT_TOKENS, size, np.int32)
        arrays["said"][: len(said)] = said
        buffers.append(layout.pack(arrays))
    return buffers


def _bias_arrays(biases: dict[int, float], vocab_size: int) -> dict[str, np.ndarray]:
    """One slot's `bias_ids` and `biases` of `LogitsParams`."""
    ids = np.arange(vocab_size, vocab_size + MAX_LOGIT_BIAS, dtype=np.int32)
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(biases)], values[: len(biases)] = list(biases), list(biases.values())
    return {"bias_ids": ids, "biases": values}


def apply_token_bitmask(
    layout: Layout, local: NamedSharding, params: LogitsParams, buffer: Array
) -> tuple[LogitsParams, Array]:
    """(parameters, a value that is there when `buffer` was read)."""
    new = layout.unpack(jax.device_put(buffer, local))
    allowed = params.allowed.at[new["slot"]].set(new["allowed"], mode="drop")
    return replace(params, allowed=allowed), new["slot"][0]


@functools.cache
def bitmask_layout(slots: int, words: int) -> Layout:
    """The buffer: slots, and their bits. Unused rows name a slot that does not exist."""
    rows = min(BITMASK_ROWS, slots)
    return Layout({"slot": ((rows,), np.int32), "allowed": ((rows, words), np.uint32)})


def pack_bitmask(
    buffer: np.ndarray, requests: Sequence[Request], token_bitmask: Fill, shapes: StepShapes
) -> list[tuple[Request, str]]:
    """Write the allowed tokens of at most `BITMASK_ROWS` requests into a buffer of
    `apply_token_bitmask`. Returns requests that have none, with the reason; they keep their former
    ones."""
    layout = bitmask_layout(shapes.slots, shapes.logits_params.allowed.shape[1])
    places = layout.views(buffer)
    nowhere = shapes.slots + 1
    failures = []
    places["slot"][len(requests) :] = nowhere
    places["slot"][: len(requests)] = [request.slot for request in requests]
    for row, why in token_bitmask(requests, places["allowed"]):
        places["slot"][row] = nowhere
        failures.append((requests[row], why))
    return failures


def _build_process(shapes: StepShapes, rows: int) -> Variant:
    logits = Resident("processed_logits", rows)
    return Variant(
        functools.partial(process_logits, shapes.model.processors),
        takes=(Resident("forward_output", rows), STATE, COUNTS, LOGITS_PARAMS, logits),
        gives=(COUNTS, logits),
    )


def _build_set(shapes: StepShapes) -> Variant:
    layout = slot_layout(shapes.logits_params)
    return Variant(
        functools.partial(set_slot, layout, shapes.replicated),
        takes=(COUNTS, LOGITS_PARAMS, shapes.host_buffer(layout.size)),
        gives=(COUNTS, LOGITS_PARAMS, shapes.replicated),
    )


def _build_bitmask(shapes: StepShapes) -> Variant:
    layout = bitmask_layout(shapes.slots, shapes.logits_params.allowed.shape[1])
    return Variant(
        functools.partial(apply_token_bitmask, layout, shapes.replicated),
        takes=(LOGITS_PARAMS, shapes.host_buffer(layout.size)),
        gives=(LOGITS_PARAMS, shapes.replicated),
    )


PROCESS_LOGITS = Program(
    "process_logits",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.logits, reverse=True)],
    build=_build_process,
    rank=4,
    # Functions of research code have no name that lasts
    is_kept=lambda shapes: not shapes.model.processors,
    may_need_most=always,
    is_first=never_first,
)
SET_SLOT = Program(
    "set_slot",
    sizes=lambda shapes: [()],
    build=_build_set,
    buffers=lambda shapes: 64,
    acknowledges=True,
    is_first=never_first,
)
APPLY_TOKEN_BITMASK = Program(
    "apply_token_bitmask",
    sizes=lambda shapes: [()],
    build=_build_bitmask,
    buffers=lambda shapes: 8,
    acknowledges=True,
    is_first=never_first,
)
