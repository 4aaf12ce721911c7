"""Log-probabilities of prompt tokens, a block of positions at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.row_kernels import RowKernels
from jaxllm.engine.runtime.launch import read
from jaxllm.engine.runtime.program import (
    WEIGHTS,
    Key,
    Program,
    Resident,
    Variant,
    always,
    in_flight,
    never_first,
)
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.scheduling.plan import Span
from jaxllm.sampling.logprobs import packed_logprobs


def prompt_logprobs(
    logits_of: Callable,
    mode: str,
    count: int,
    weights: tuple[Array, ...],
    hidden_states: Array,
    buffer: Array,
    *,
    local: NamedSharding,
) -> Array:
    """`packed_logprobs` of prompt tokens by their `prompt_logits`, which `logits_of` gives.

    `buffer` holds rows of `hidden_states`, then the tokens that follow them. A block is small,
    because logits are much larger than hidden states.
    """
    row, token = jax.device_put(buffer, local).reshape(2, -1)
    logits = logits_of(weights, hidden_states, row)
    return packed_logprobs(logits, token, count, normalised=mode.endswith("logprobs"))


def prompt_logits(
    model: Model, weights: tuple[Array, ...], hidden_states: Array, row: Array
) -> Array:
    """The logits behind some rows of the `hidden_states` that `extend` left."""
    module = model.rebuild(weights)
    kernels = RowKernels(model.target, model.collective)
    carry = module.unpacked(model.collective.sum(hidden_states[row]))
    return module.logits(module.after_attention(carry, kernels), kernels)


def pack_scores(todo: list[Span], shapes: StepShapes) -> list[tuple[Key, np.ndarray]]:
    """Calls of `prompt_logprobs` for these spans, in blocks of one size."""
    if not todo:
        return []
    size = shapes.buckets.score
    width = shapes.width(max(span.request.params.prompt_logprobs or 0 for span in todo))
    wanted = score_rows(todo)
    blocks = [wanted[:, at : at + size] for at in range(0, wanted.shape[1], size)]
    padded = [np.pad(block, ((0, 0), (0, size - block.shape[1]))) for block in blocks]
    return [(Key("prompt_logprobs", (size, width)), block.reshape(-1)) for block in padded]


def score_rows(todo: list[Span]) -> np.ndarray:
    """int32 `[2, rows]`: for every position, the row of its hidden state and the token that follows
    it."""
    rows = [np.arange(span.row, span.row + span.stop - span.start) for span in todo]
    tokens = [np.array(span.request.prompt.tokens[span.start + 1 : span.stop + 1]) for span in todo]
    return np.stack([np.concatenate(rows), np.concatenate(tokens)]).astype(np.int32)


@dataclass(frozen=True)
class PromptScores:
    """Packed log-probabilities of prompt positions that are still on the device, in blocks of equal
    size."""

    todo: list[Span]
    blocks: list[Array]

    def collect(self) -> list[tuple[Span, np.ndarray]]:
        """Wait for them; each span with its packed rows."""
        rows = np.concatenate([read(block) for block in self.blocks])
        ends = np.cumsum([span.stop - span.start for span in self.todo])
        return [
            (span, rows[end - (span.stop - span.start) : end])
            for span, end in zip(self.todo, ends, strict=True)
        ]


def _build(shapes: StepShapes, rows: int, width: int) -> Variant:
    states = Resident("hidden_states")
    row = shapes.array((rows,), np.int32)
    logits_of = shapes.per_device(
        functools.partial(prompt_logits, shapes.model),
        (shapes.weights, shapes.hidden_states, row),
        shapes.split_vocab,
    )
    function = functools.partial(
        prompt_logprobs, logits_of, shapes.logprobs_mode, width, local=shapes.replicated
    )
    return Variant(
        function,
        takes=(WEIGHTS, states, shapes.host_buffer(2 * rows)),
        gives=(shapes.host,),
    )


def _buffers(shapes: StepShapes) -> int:
    """A step scores at most all its tokens."""
    return -(-shapes.buckets.max_tokens // shapes.buckets.score) * (in_flight(shapes) + 2)


PROGRAM = Program(
    "prompt_logprobs",
    sizes=lambda shapes: [(shapes.buckets.score, width) for width in shapes.widths],
    build=_build,
    rank=3,
    is_kept=always,
    has_products=True,
    may_need_most=always,
    buffers=_buffers,
    is_first=never_first,
)
