"""Logits to tokens, the progress of the slots that got one, and the tokens' log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxllm.engine.runtime.program import (
    PEERS,
    STATE,
    Program,
    Resident,
    Sizes,
    Variant,
    always,
    draws,
    generates,
    never_first,
)
from jaxllm.engine.runtime.shapes import Draw, StepShapes
from jaxllm.engine.runtime.state import (
    PROGRESS,
    SLOT_PARAMS,
    ForwardOutput,
    SlotState,
    device_columns,
    pack_progress,
)
from jaxllm.sampling.logprobs import packed_logprobs, processed
from jaxllm.sampling.sample import Sampler, draw_rows, is_draw_kernel


def sample(
    draw_with: Callable[[tuple[Array, ...]], Draw],
    sampler: Sampler,
    backend: str,
    logits: Array,
    forward_output: ForwardOutput,
    progress: Array,
    params: Array,
    peers: tuple[Array, ...],
) -> tuple[Array, Array]:
    """Sample every row of `logits` and advance the slots that emit: (progress, token of each row).
    `progress` and `params` are those of the slot state. `draw_with` gives `sampling.sample`,
    or the same over a split vocabulary. A row that does not emit gets token -1 and changes no slot.

    A step that gives n tokens a row would return them as [Q, n] with counts [Q].
    """
    slots = forward_output.slots
    emit = forward_output.emit
    now = device_columns(progress[slots], PROGRESS)
    columns = device_columns(params[slots], SLOT_PARAMS)
    rows = draw_rows(columns, now["position"] + 1, now["min_left"] > 0)
    token = draw_with(peers)(logits, rows, sampler, backend)
    target = jnp.where(emit, slots, progress.shape[0])
    return _advanced(progress, target, now, columns, token), jnp.where(emit, token, -1)


def telling(
    draw: Callable, logits: Array, forward_output: ForwardOutput, progress: Array, *rest: Any
) -> tuple[Array, Array, Array]:
    """`sample`, for the last of several stages; also what `advance` needs in the others, [2, Q]:
    token and slot of each row. A row that does not emit has a slot that does not exist."""
    new, token = draw(logits, forward_output, progress, *rest)
    slot = jnp.where(forward_output.emit, forward_output.slots, progress.shape[0])
    return new, token, jnp.stack([token, slot])


def advance(progress: Array, params: Array, drawn: Array) -> Array:
    """The progress of a stage's slots with the tokens that the last stage has drawn."""
    token, target = drawn
    now = device_columns(progress[target], PROGRESS)
    columns = device_columns(params[target], SLOT_PARAMS)
    return _advanced(progress, target, now, columns, token)


def _advanced(
    progress: Array,
    target: Array,
    now: dict[str, Array],
    columns: dict[str, Array],
    token: Array,
) -> Array:
    """The progress with a token for each of these slots, whose rows are `now`."""
    stopped = jnp.any(token[:, None] == columns["stop_ids"], axis=1) | (token < 0)
    remaining = now["remaining"] - 1
    new = pack_progress(
        token=token,
        position=now["position"] + 1,
        alive=~stopped & (remaining > 0),
        remaining=remaining,
        min_left=now["min_left"] - 1,
    )
    return progress.at[target].set(new, mode="drop")


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


def _build_sample(shapes: StepShapes, rows: int, sampler: int) -> Variant:
    progress = Resident("state", field="progress")
    logits = Resident("logits", rows)
    output = Resident("forward_output", rows)
    takes = (logits, output, progress, Resident("state", field="params"), PEERS)
    function: Callable = functools.partial(
        sample, shapes.draw, Sampler(sampler), shapes.draw_backend
    )
    told: tuple[Resident, ...] = ()
    if shapes.stage.count > 1:
        function = functools.partial(telling, function)
        told = (Resident("drawn", rows),)
    given = tuple(at.shapes(shapes) for at in takes)
    told_shapes = (drawn.shapes(shapes) for drawn in told)
    made = (progress.shapes(shapes), shapes.replicated, *told_shapes)
    gives = (progress, shapes.host, *told)
    return Variant(shapes.per_device(function, given, made), takes, gives)


def _build_advance(shapes: StepShapes, rows: int) -> Variant:
    progress = Resident("state", field="progress")
    takes = (progress, Resident("state", field="params"), shapes.drawn(rows))
    return Variant(advance, takes, gives=(progress,))


def _build_logprobs(shapes: StepShapes, rows: int, width: int) -> Variant:
    output = Resident("forward_output", rows)
    processed_mode = shapes.logprobs_mode.startswith("processed")
    logits = Resident("logits", rows) if processed_mode else output._replace(field="logits")
    return Variant(
        functools.partial(logprobs, shapes.logprobs_mode, width),
        takes=(logits, output, STATE),
        gives=(shapes.host,),
    )


def _is_first_sample(shapes: StepShapes, sizes: Sizes) -> bool:
    """The cheapest sampler and the one that does all, of the first forwards."""
    rows, sampler = sizes
    return rows in shapes.buckets.first.logits and sampler in (
        shapes.samplers[0],
        shapes.samplers[-1],
    )


SAMPLE = Program(
    "sample",
    sizes=lambda shapes: [
        (rows, int(sampler))
        for rows in sorted(shapes.buckets.logits, reverse=True)
        for sampler in shapes.samplers
    ],
    build=_build_sample,
    rank=1,
    is_kept=always,
    # A draw kernel needs no memory, and lowers for seconds
    may_need_most=lambda shapes: not is_draw_kernel(shapes.draw_backend),
    is_first=_is_first_sample,
)
ADVANCE = Program(
    "advance",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.logits, reverse=True)],
    build=_build_advance,
    runs=lambda shapes: generates(shapes) and not draws(shapes),
)
LOGPROBS = Program(
    "logprobs",
    sizes=lambda shapes: [
        (rows, width)
        for rows in sorted(shapes.buckets.logits, reverse=True)
        for width in shapes.widths
    ],
    build=_build_logprobs,
    rank=5,
    is_kept=always,
    may_need_most=always,
    is_first=never_first,
)
