"""Log-probabilities of prompt tokens, a block of positions at a time."""

from __future__ import annotations

import functools

import jax
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.kv import RowKernels
from jaxllm.engine.runtime.program import (
    MAX_DEPTH,
    WEIGHTS,
    Program,
    Resident,
    Variant,
    always,
)
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.sampling.logprobs import packed_logprobs


def prompt_logprobs(
    model: Model,
    mode: str,
    count: int,
    weights: tuple[Array, ...],
    hidden_states: Array,
    buffer: Array,
    *,
    local: NamedSharding,
) -> Array:
    """`packed_logprobs` of prompt tokens. `buffer` holds rows of `hidden_states`, then the tokens
    that follow them. A block is small, because logits are much larger than hidden states."""
    row, token = jax.device_put(buffer, local).reshape(2, -1)
    module, kernels = model.rebuild(weights), RowKernels(model.backend, model.mesh)
    logits = module.logits(module.after_attention(hidden_states[row], None, kernels))
    return packed_logprobs(logits, token, count, normalised=mode.endswith("logprobs"))


def _build(shapes: StepShapes, rows: int, width: int) -> Variant:
    function = functools.partial(
        prompt_logprobs, shapes.model, shapes.logprobs_mode, width, local=shapes.replicated
    )
    return Variant(
        function,
        takes=(WEIGHTS, Resident("hidden_states"), shapes.host_buffer(2 * rows)),
        gives=(shapes.host,),
    )


def _buffers(shapes: StepShapes) -> int:
    """A step scores at most all its tokens."""
    return -(-shapes.buckets.max_tokens // shapes.buckets.score) * (MAX_DEPTH + 2)


PROGRAM = Program(
    "prompt_logprobs",
    sizes=lambda shapes: [(shapes.buckets.score, width) for width in shapes.widths],
    build=_build,
    rank=3,
    is_kept=always,
    has_products=True,
    may_need_most=always,
    buffers=_buffers,
)
