"""Upload of the tokens that structured output allows next."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import Layout
from jaxllm.engine.runtime.program import LOGITS_PARAMS, Program, Variant
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.sampling.process import LogitsParams

# Rows of one call; at a vocabulary of 152,064 they are 1.2 MB, 25 µs of a GPU's link
BITMASK_ROWS = 64


def apply_token_bitmask(
    layout: Layout, local: NamedSharding, params: LogitsParams, buffer: Array
) -> tuple[LogitsParams, Array]:
    """(parameters, a value that is there when `buffer` was read)."""
    new = layout.unpack(jax.device_put(buffer, local))
    allowed = params.allowed.at[new["slot"]].set(new["allowed"], mode="drop")
    return replace(params, allowed=allowed), new["slot"][0]


def bitmask_layout(slots: int, words: int) -> Layout:
    """The buffer: slots, and their bits. Unused rows name a slot that does not exist."""
    rows = min(BITMASK_ROWS, slots)
    return Layout({"slot": ((rows,), np.int32), "allowed": ((rows, words), np.uint32)})


def _build(shapes: StepShapes) -> Variant:
    layout = bitmask_layout(shapes.slots, shapes.logits_params.allowed.shape[1])
    return Variant(
        functools.partial(apply_token_bitmask, layout, shapes.replicated),
        takes=(LOGITS_PARAMS, shapes.host_buffer(layout.size)),
        gives=(LOGITS_PARAMS, shapes.replicated),
    )


PROGRAM = Program(
    "apply_token_bitmask",
    sizes=lambda shapes: [()],
    build=_build,
    buffers=lambda shapes: 8,
    acknowledges=True,
)
