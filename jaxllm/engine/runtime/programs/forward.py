"""Forwards: one token for each running request, and prompt chunks with decode rows beside them.

Each runs on every device, over the device's own heads, inner widths and share of the vocabulary.
Where the layers are divided into stages, each stage has forwards of its own, which differ in their
ends: how rows enter its layers, and what leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
from jax import Array

from jaxllm.cache.arrays import KVCache
from jaxllm.engine.runtime.program import (
    KV,
    PEERS,
    STATE,
    WEIGHTS,
    Program,
    Resident,
    Variant,
    always,
    generates,
)
from jaxllm.engine.runtime.programs.ends import (
    Embed,
    Enter,
    HandOn,
    LastLogits,
    Leave,
    Logits,
    Receive,
)
from jaxllm.engine.runtime.programs.step_rows import Chunks, Decodes, RowSource
from jaxllm.engine.runtime.programs.update_slots import buffer_size
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.scheduling.buckets import ExtendShape


@dataclass(frozen=True)
class Forward:
    """Rows enter the layers of a stage, pass them, and leave.

    Each part says which arrays it `takes` and `gives`. The rows' stand first, then what `leave`
    takes, then what `enter` takes.
    """

    rows: RowSource
    enter: Enter
    leave: Leave

    def __call__(
        self,
        model: Model,
        weights: tuple[Array, ...],
        kv: KVCache,
        state: SlotState,
        *arrays: Any,
    ) -> tuple[Any, ...]:
        """The pages, then what the parts give."""
        rest = iter(arrays)
        rows = self.rows.read(model, kv, state, *islice(rest, len(self.rows.takes)))
        module = model.rebuild(weights)
        reused = [*islice(rest, len(self.leave.takes))]
        carry = module.through_layers(self.enter(module, rows, *rest), rows.context)
        return (rows.context.kv, *rows.state, *self.leave(model, module, carry, rows, *reused))

    @property
    def takes(self) -> tuple[Any, ...]:
        """See `Variant`."""
        return (WEIGHTS, KV, STATE, *self.rows.takes, *self.leave.takes, *self.enter.takes)

    @property
    def gives(self) -> tuple[Any, ...]:
        """See `Variant`."""
        return (KV, *self.rows.gives, *self.leave.gives)


def _enter(shapes: StepShapes, tokens: int) -> Enter:
    """How rows enter the layers of these devices' stage."""
    if shapes.stage.is_first:
        return Embed()
    return Receive(shapes.handed(tokens))


def _leave(shapes: StepShapes, logits: Leave) -> Leave:
    """What leaves the layers of these devices' stage: these `logits`, if it is the last."""
    return logits if shapes.stage.is_last else HandOn(shapes.replicated)


def _build_decode(shapes: StepShapes, rows: int) -> Variant:
    logits = Logits(rows, shapes.buckets.logit_rows(rows))
    forward = Forward(Decodes(rows), _enter(shapes, rows), _leave(shapes, logits))
    return _per_device(shapes, forward, "decode")


def _build_extend(shapes: StepShapes, tokens: int, chunks: int, decodes: int) -> Variant:
    layout = shapes.chunk_layouts[ExtendShape(tokens, chunks, decodes)]
    rows = Chunks(layout, shapes.host_buffer(buffer_size(shapes, layout)), shapes.row_writes)
    leave = _leave(shapes, LastLogits(layout))
    forward = Forward(rows, _enter(shapes, tokens + decodes), leave)
    return _brought(shapes, _per_device(shapes, forward, "extend"))


def _per_device(shapes: StepShapes, forward: Forward, name: str) -> Variant:
    """A forward on every device, over the device's own arrays. Profiles show its name."""
    takes = forward.takes

    def function(*arrays: Any) -> Any:
        return forward(shapes.model, *arrays)

    if shapes.peers:
        takes = (*takes, PEERS)

        def function(*arrays: Any) -> Any:
            return forward(shapes.model.with_peers(arrays[-1]), *arrays[:-1])

    function.__name__ = forward.leave.prefix + name
    given, made = (
        tuple(array.shapes(shapes) if isinstance(array, Resident) else array for array in side)
        for side in (takes, forward.gives)
    )
    return Variant(shapes.per_device(function, given, made), takes, forward.gives)


def _brought(shapes: StepShapes, variant: Variant) -> Variant:
    """A forward with what the host brings to it: its fourth argument is copied to the device.

    So a step with chunks is one launch. Of two devices another one would take half a millisecond.
    """

    def function(weights: Any, kv: Any, state: Any, buffer: Array, *rest: Any) -> Any:
        staged = jax.device_put(buffer, shapes.replicated)
        return variant.function(weights, kv, state, staged, *rest)

    function.__name__ = variant.function.__name__
    return replace(variant, function=function)


def _extend_sizes(shapes: StepShapes) -> list[tuple[int, ...]]:
    """Shapes with two attention kernels first, then the largest."""
    extends = sorted(shapes.buckets.extend, key=lambda s: (not s.decodes, -s.tokens))
    return [(s.tokens, s.chunks, s.decodes) for s in extends]


DECODE = Program(
    "decode",
    sizes=lambda shapes: [(rows,) for rows in sorted(shapes.buckets.decode)],
    build=_build_decode,
    rank=2,
    is_kept=always,
    has_products=True,
    runs=generates,
    is_first=lambda shapes, sizes: sizes[0] in shapes.buckets.first.decode,
)
EXTEND = Program(
    "extend",
    sizes=_extend_sizes,
    build=_build_extend,
    rank=0,
    is_kept=always,
    has_products=True,
    rows=lambda sizes: sizes[0] + sizes[2],
    runs=generates,
    is_first=lambda shapes, sizes: ExtendShape(*sizes) in shapes.buckets.first.extend,
)
