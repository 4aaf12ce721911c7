"""Log-probabilities of the tokens that were just sampled."""

from __future__ import annotations

import functools

from jax import Array

from jaxllm.engine.runtime.program import STATE, Program, Resident, Variant, always
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    device_columns,
)
from jaxllm.sampling.logprobs import packed_logprobs, processed
from jaxllm.sampling.sample import draw_rows


def logprobs(
    mode: str, count: int, logits: Array, forward_output: ForwardOutput, state: SlotState
) -> Array:
    """`packed_logprobs` of each row's newest token and the `count` most likely ones; rows that
    sampled none hold anything. `mode` is one of `config.LOGPROBS_MODES`; a processed one wants the
    logits that `sample` took."""
    now = device_columns(state.progress[forward_output.slots], PROGRESS)
    if mode.startswith("processed"):
        params = device_columns(state.params[forward_output.slots], SLOT_PARAMS)
        # As before the draw, which lowered `min_left`
        banned = now["min_left"] + forward_output.emit > 0
        logits = processed(logits, draw_rows(params, now["position"] + 1, banned))
    return packed_logprobs(logits, now["token"], count, normalised=mode.endswith("logprobs"))


def _build(shapes: StepShapes, rows: int, width: int) -> Variant:
    output = Resident("forward_output", rows)
    processed_mode = shapes.logprobs_mode.startswith("processed")
    logits = Resident("logits", rows) if processed_mode else output._replace(field="logits")
    return Variant(
        functools.partial(logprobs, shapes.logprobs_mode, width),
        takes=(logits, output, STATE),
        gives=(shapes.host,),
    )


PROGRAM = Program(
    "logprobs",
    sizes=lambda shapes: [
        (rows, width)
        for rows in sorted(shapes.buckets.logits, reverse=True)
        for width in shapes.widths
    ],
    build=_build,
    rank=5,
    is_kept=always,
    may_need_most=always,
)
