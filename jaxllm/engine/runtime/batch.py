"""Plans as padded arrays. Everything a step needs from the host travels as one int32 buffer;
`unpack` splits it on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.engine.runtime.state import SLOT_PARAMS, named, width_of
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.plan import Chunk, Plan
from jaxllm.engine.scheduling.request import Request

type Shapes = dict[str, tuple[tuple[int, ...], type]]

# The best token has more, and programs flush what float32 cannot hold to 0, which no token would
# reach
LEAST_TOP_P = 1e-7


# Int32 elements: kernels may be given a view into the buffer and ask for 256-byte alignment
ALIGN = 64


def offsets(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Where each array starts in the buffer, and the buffer's size, in elements."""
    starts, end = {}, 0
    for name, (shape, _) in shapes.items():
        starts[name] = end
        end += -(-math.prod(shape) // ALIGN) * ALIGN
    return starts, end


def pack(arrays: dict[str, np.ndarray], shapes: Shapes) -> np.ndarray:
    """One flat int32 buffer; float32 and uint32 keep their bits."""
    starts, size = offsets(shapes)
    buffer = np.zeros(size, np.int32)
    for name, start in starts.items():
        flat = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.int32)
        buffer[start : start + flat.size] = flat
    return buffer


def views(buffer: np.ndarray, shapes: Shapes) -> dict[str, np.ndarray]:
    """The arrays of `pack` where they lie in a buffer, to be written in place."""
    starts, _ = offsets(shapes)
    return {
        name: buffer[starts[name] :][: math.prod(shape)].view(dtype).reshape(shape)
        for name, (shape, dtype) in shapes.items()
    }


def unpack(buffer: Array, shapes: Shapes) -> dict[str, Array]:
    """The arrays of `pack`, inside a compiled program."""
    out = {}
    starts, _ = offsets(shapes)
    for name, (shape, dtype) in shapes.items():
        part = jax.lax.slice(buffer, (starts[name],), (starts[name] + math.prod(shape),)).reshape(
            shape
        )
        out[name] = (
            part if dtype is np.int32 else jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
        )
    return out


def packed_size(shapes: Shapes) -> int:
    """Elements of the buffer."""
    return offsets(shapes)[1]


def update_shapes(slots: int, kinds: int) -> Shapes:
    """The decode region's row map, and at most one new page per row and kind of layers: table[slot,
    index] = page."""
    rows: Shapes = {"rows": ((slots,), np.int32)}
    return rows | dict.fromkeys(("slot", "index", "page"), ((slots * kinds,), np.int32))


def update_arrays(plan: Plan, shapes: Shapes, width: int) -> dict[str, np.ndarray]:
    """Arrays of `update_shapes` for a plan, in tables of `width` pages a cache group. Unused
    entries name the slot S + 1, which drops them."""
    arrays = {name: np.zeros(shape, np.int32) for name, (shape, _) in shapes.items()}
    slots = len(arrays["rows"])
    arrays["rows"][:] = slots
    arrays["rows"][: len(plan.decodes)] = plan.slots
    arrays["slot"][:] = slots + 1
    for at, (slot, column, page, group) in enumerate(plan.table_writes):
        arrays["slot"][at], arrays["index"][at] = slot, column + group * width
        arrays["page"][at] = page
    return arrays


@dataclass(frozen=True)
class ChunkLayout:
    """How prompt chunks are laid out for one `ExtendShape` and table width, and how many rows of
    logits the step gives."""

    shape: ExtendShape
    table_width: int  # pages, of all kinds of layers together
    # At least decodes + chunks; padded so that few sampling programs serve all shapes
    logit_rows: int

    @property
    def shapes(self) -> Shapes:
        t, r = self.shape.tokens, self.shape.chunks
        ints: Shapes = dict.fromkeys(("token", "position", "row"), ((t,), np.int32))
        ints |= dict.fromkeys(
            ("slot", "start", "length", "kv_length", "kept", "final", "remaining", "min_left"),
            ((r,), np.int32),
        )
        return ints | {
            "asks": ((r, width_of(SLOT_PARAMS)), np.int32),
            "table": ((r, self.table_width), np.int32),
        }

    def pack(self, chunks: Sequence[Chunk], slots: int, eos_ids: Sequence[int]) -> np.ndarray:
        """The buffer for these chunks; padding rows use the trash slot, padding tokens row R."""
        arrays: dict[str, np.ndarray] = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.shapes.items()
        }
        arrays["row"][:] = self.shape.chunks
        arrays["slot"][:] = slots
        asks = named(arrays["asks"], SLOT_PARAMS)
        asks["stop_ids"][:] = -1
        start = 0
        for row, chunk in enumerate(chunks):
            span = slice(start, start + chunk.length)
            arrays["token"][span] = chunk.request.tokens(chunk.start, chunk.start + chunk.length)
            arrays["position"][span] = np.arange(chunk.start, chunk.start + chunk.length)
            arrays["row"][span] = row
            arrays["start"][row], arrays["length"][row] = start, chunk.length
            _fill_row(arrays, row, chunk)
            _fill_asks(asks, row, chunk.request, eos_ids)
            start += chunk.length
        return pack(arrays, self.shapes)


def _fill_row(arrays: dict[str, np.ndarray], row: int, chunk: Chunk) -> None:
    """A chunk carries its request's whole slot, so that a recycled slot keeps nothing of its last
    owner."""
    request = chunk.request
    arrays["slot"][row] = request.slot
    arrays["kv_length"][row] = chunk.start + chunk.length
    arrays["kept"][row] = request.kept
    arrays["final"][row] = chunk.final
    arrays["remaining"][row] = request.max_tokens - len(request.output)
    arrays["min_left"][row] = max(0, request.params.min_tokens - len(request.output))
    width = arrays["table"].shape[1] // len(request.tables)
    for kind, table in enumerate(request.tables):
        arrays["table"][row, kind * width : kind * width + len(table.pages)] = table.pages


def _fill_asks(
    asks: dict[str, np.ndarray], row: int, request: Request, eos_ids: Sequence[int]
) -> None:
    params = request.params
    stops = stop_ids(params.stop_token_ids, () if params.ignore_eos else eos_ids)
    asks["prompt_length"][row] = len(request.prompt)
    asks["processed"][row] = request.asked is not None
    asks["temperature"][row] = 0.0 if params.greedy else params.temperature
    asks["top_p"][row] = max(params.top_p, LEAST_TOP_P)
    asks["min_p"][row] = params.min_p
    asks["top_k"][row] = max(0, params.top_k)
    asks["key"][row] = np.array([request.seed], np.uint64).view(np.uint32)
    asks["stop_ids"][row, : len(stops)] = stops


def stop_ids(asked: Sequence[int] | None, eos_ids: Sequence[int]) -> list[int]:
    """Every id that ends a request."""
    return list(dict.fromkeys([*(asked or ()), *eos_ids]))
