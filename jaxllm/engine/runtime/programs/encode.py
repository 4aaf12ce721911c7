"""Forward of an encoder: whole prompts to one vector for each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.cache.segments import SegmentContext, Segments
from jaxllm.engine.runtime.packing import Layout, Shapes
from jaxllm.engine.runtime.program import WEIGHTS, Program, Variant, always
from jaxllm.engine.runtime.shapes import Model, StepShapes
from jaxllm.engine.scheduling.plan import Chunk


def encode(
    encoded: Callable, weights: tuple[Array, ...], buffer: Array, *, local: NamedSharding
) -> Array:
    """`encoded_prompts` of a buffer that the host filled."""
    return encoded(weights, jax.device_put(buffer, local))


def encoded_prompts(
    model: Model, layout: Layout, longest: int, weights: tuple[Array, ...], buffer: Array
) -> Array:
    """float32 `[R, E]`, the vector of each prompt of `buffer`."""
    batch = layout.unpack(buffer)
    start = batch["start"]
    end = batch["start"] + batch["length"]
    first_T, end_T = (jnp.pad(x, (0, 1))[batch["row"]] for x in (start, end))
    context = SegmentContext(
        Segments(first_T, end_T, longest), model.backend, model.collective, model.target
    )
    return model.rebuild(weights).encode(
        batch["token"], batch["position"], batch["second"], batch["start"], batch["length"], context
    )


@functools.cache
def prompt_layout(tokens: int, prompts: int) -> Layout:
    """The buffer. Per token: its id, position, prompt, and whether it is of a second text. Per
    prompt: its first token's index, and its tokens."""
    of_tokens: Shapes = dict.fromkeys(("token", "position", "row", "second"), ((tokens,), np.int32))
    return Layout(of_tokens | dict.fromkeys(("start", "length"), ((prompts,), np.int32)))


def pack_prompts(chunks: Sequence[Chunk], tokens: int, prompts: int) -> np.ndarray:
    """A buffer with these chunks, each a whole prompt. Padding tokens are of prompt R, which has
    no tokens."""
    layout = prompt_layout(tokens, prompts)
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.views(buffer)
    used = len(chunks)
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    row = np.repeat(np.arange(used, dtype=np.int32), lengths)
    place = np.arange(total, dtype=np.int32) - starts[row]
    ids = itertools.chain.from_iterable(chunk.request.prompt.tokens for chunk in chunks)
    second = np.array([chunk.request.second_text or chunk.length for chunk in chunks], np.int32)
    arrays["token"][:total] = np.fromiter(ids, np.int32, total)
    arrays["position"][:total] = place
    arrays["row"][:total] = row
    arrays["row"][total:] = prompts
    arrays["second"][:total] = place >= second[row]
    arrays["start"][:used] = starts
    arrays["length"][:used] = lengths
    return buffer


def _build(shapes: StepShapes, tokens: int, prompts: int) -> Variant:
    layout = prompt_layout(tokens, prompts)
    longest = shapes.table_width * shapes.model.page_size
    encoded = shapes.per_device(
        functools.partial(encoded_prompts, shapes.model, layout, longest),
        (shapes.weights, shapes.array((layout.size,), jnp.int32)),
        shapes.replicated,
    )
    return Variant(
        functools.partial(encode, encoded, local=shapes.replicated),
        takes=(WEIGHTS, shapes.host_buffer(layout.size)),
        gives=(shapes.host,),
    )


PROGRAM = Program(
    "encode",
    sizes=lambda shapes: [(s.tokens, s.chunks) for s in reversed(shapes.buckets.extend)],
    build=_build,
    rank=0,
    is_kept=always,
    has_products=True,
    runs=lambda shapes: shapes.pooling is not None and shapes.pooling.bidirectional,
)
