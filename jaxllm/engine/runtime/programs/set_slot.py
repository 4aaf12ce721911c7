"""Upload of a slot's logits parameters and output so far, for `process_logits`."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import Layout, Shapes
from jaxllm.engine.runtime.program import COUNTS, LOGITS_PARAMS, Program, Variant
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.sampling.process import LogitsParams, set_slot_params

OUTPUT_TOKENS = 1024  # tokens of an output that one call takes


def set_slot(
    layout: Layout, local: NamedSharding, counts: Array, params: LogitsParams, buffer: Array
) -> tuple[Array, LogitsParams, Array]:
    """(counts, parameters, a value that is there when `buffer` was read)."""
    new = layout.unpack(jax.device_put(buffer, local))
    return *set_slot_params(counts, params, new), new["slot"][0]


def slot_layout(params: LogitsParams) -> Layout:
    """The buffer: one slot's row of each parameter, its number, tokens of its output, and whether
    they are the first ones."""
    rows: Shapes = {name: (s.shape[1:], np.dtype(s.dtype).type) for name, s in vars(params).items()}
    rows |= dict.fromkeys(("slot", "first"), ((1,), np.int32))
    return Layout(rows | {"said": ((OUTPUT_TOKENS,), np.int32)})


def _build(shapes: StepShapes) -> Variant:
    layout = slot_layout(shapes.logits_params)
    return Variant(
        functools.partial(set_slot, layout, shapes.replicated),
        takes=(COUNTS, LOGITS_PARAMS, shapes.host_buffer(layout.size)),
        gives=(COUNTS, LOGITS_PARAMS, shapes.replicated),
    )


PROGRAM = Program(
    "set_slot",
    sizes=lambda shapes: [()],
    build=_build,
    buffers=lambda shapes: 64,
    acknowledges=True,
)
