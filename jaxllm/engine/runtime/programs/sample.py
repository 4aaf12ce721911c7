"""Logits to tokens, and the progress of the slots that got one."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from jaxllm.engine.runtime.program import Program, Resident, Variant, always
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    device_columns,
    pack_progress,
)
from jaxllm.sampling import sample as sampling
from jaxllm.sampling.sample import Sampler


def sample(
    sampler: Sampler,
    backend: str,
    logits: Array,
    forward_output: ForwardOutput,
    progress: Array,
    params: Array,
) -> tuple[Array, Array]:
    """Sample every row of `logits` and advance the slots that emit: (progress, token of each row).
    `progress` and `params` are those of the slot state. A row that does not emit gets token -1 and
    changes no slot.

    A step that gives n tokens a row would return them as [Q, n] with counts [Q].
    """
    slots, emit = forward_output.slots, forward_output.emit
    now = device_columns(progress[slots], PROGRESS)
    columns, position = device_columns(params[slots], SLOT_PARAMS), now["position"] + 1
    rows = sampling.draw_rows(columns, position, now["min_left"] > 0)
    token = sampling.sample(logits, rows, sampler, backend)
    stopped = jnp.any(token[:, None] == columns["stop_ids"], axis=1) | (token < 0)
    remaining = now["remaining"] - 1
    new = pack_progress(
        token=token,
        position=position,
        alive=~stopped & (remaining > 0),
        remaining=remaining,
        min_left=now["min_left"] - 1,
    )
    target = jnp.where(emit, slots, progress.shape[0])
    return progress.at[target].set(new, mode="drop"), jnp.where(emit, token, -1)


def _build(shapes: StepShapes, rows: int, sampler: int) -> Variant:
    progress = Resident("state", field="progress")
    logits, output = Resident("logits", rows), Resident("forward_output", rows)
    return Variant(
        functools.partial(sample, Sampler(sampler), shapes.draw_backend),
        takes=(logits, output, progress, Resident("state", field="params")),
        gives=(progress, shapes.host),
    )


PROGRAM = Program(
    "sample",
    sizes=lambda shapes: [
        (rows, int(sampler))
        for rows in sorted(shapes.buckets.logits, reverse=True)
        for sampler in shapes.samplers
    ],
    build=_build,
    rank=1,
    is_kept=always,
    # A draw kernel needs no memory, and lowers for seconds
    may_need_most=lambda shapes: shapes.draw_backend == "reference",
)
