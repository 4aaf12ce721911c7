"""Host arrays of a step as one int32 buffer, packed on the host and unpacked on the device; prompt
chunks above all."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.engine.runtime.state import SLOT_PARAMS, host_columns, width_of
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.plan import Chunk
from jaxllm.engine.scheduling.request import Request
from jaxllm.sampling.options import COLUMNS

type Shapes = dict[str, tuple[tuple[int, ...], type]]

# Elements: kernels may get a view into the buffer, and ask for an alignment of 256 bytes
ALIGN = 64
INT32_BYTES = 4


class Layout:
    """Places of arrays in one buffer, computed once for the steps that share it.

    Attributes:
        shapes: shape and type of each array by name.
        spans: its elements of the buffer.
        size: elements of the buffer.
    """

    def __init__(self, shapes: Shapes):
        self.shapes, self.spans, self.size = shapes, dict[str, slice](), 0
        for name, (shape, _) in shapes.items():
            self.spans[name] = slice(self.size, self.size + math.prod(shape))
            self.size += -(-math.prod(shape) // ALIGN) * ALIGN

    def pack(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """One flat int32 buffer; float32 and uint32 keep their bits."""
        buffer = np.zeros(self.size, np.int32)
        for name, view in self.views(buffer).items():
            view[...] = arrays[name]
        return buffer

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of the arrays in a buffer."""
        found = {}
        for name, (shape, dtype) in self.shapes.items():
            part = buffer[self.spans[name]]
            if dtype is not np.int32:
                part = part.view(dtype)
            found[name] = part if len(shape) == 1 else part.reshape(shape)
        return found

    def unpack(self, buffer: Array) -> dict[str, Array]:
        """The arrays, inside a compiled program."""
        out = {}
        for name, (shape, dtype) in self.shapes.items():
            span = self.spans[name]
            part = jax.lax.slice(buffer, (span.start,), (span.stop,)).reshape(shape)
            if dtype is not np.int32:
                part = jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
            out[name] = part
        return out


@dataclass(frozen=True)
class ChunkLayout:
    """The arrays that chunks are packed into.

    Attributes:
        shape: T chunk tokens, R chunks, B decode rows.
        table_width: pages of a slot's table, of all cache groups together.
        logit_rows: rows of logits of the step, at least B + R. Padded, so that few sampling
            programs serve all shapes.
    """

    shape: ExtendShape
    table_width: int
    logit_rows: int

    @functools.cached_property
    def arrays(self) -> Layout:
        """The arrays by name. Per token: its id, position, and chunk row. Per chunk: its slot, its
        first token's index, tokens, tokens with the cached prefix, tokens whose KV exists already,
        whether it samples, and the slot's state."""
        t, r = self.shape.tokens, self.shape.chunks
        ints: Shapes = dict.fromkeys(("token", "position", "row"), ((t,), np.int32))
        ints |= dict.fromkeys(
            ("slot", "start", "length", "kv_length", "kept", "final", "remaining", "min_left"),
            ((r,), np.int32),
        )
        params, table = ((r, width) for width in (width_of(SLOT_PARAMS), self.table_width))
        return Layout(ints | {"params": (params, np.int32), "table": (table, np.int32)})

    def pack_chunks(
        self, buffer: np.ndarray, chunks: Sequence[Chunk], slots: int, eos_ids: Sequence[int]
    ) -> None:
        """Write these chunks into a zeroed buffer. Padding rows use the trash slot, padding tokens
        row R."""
        views = ChunkViews(self, buffer)
        views.pad(slots)
        views.write(chunks, eos_ids)


class ChunkViews:
    """The arrays of a layout in one buffer, to pack chunks into."""

    def __init__(self, layout: ChunkLayout, buffer: np.ndarray):
        self._rows, self._arrays = layout.shape.chunks, layout.arrays.views(buffer)
        self._params = host_columns(self._arrays["params"], SLOT_PARAMS)

    def pad(self, slots: int) -> None:
        """Make a zeroed buffer one without chunks."""
        self._arrays["row"][:] = self._rows
        self._arrays["slot"][:] = slots
        self._params["stop_ids"][:] = -1

    def write(self, chunks: Sequence[Chunk], eos_ids: Sequence[int]) -> None:
        """Write chunks into a buffer without any."""
        arrays, start = self._arrays, 0
        for row, chunk in enumerate(chunks):
            tokens = chunk.request.tokens(chunk.start, chunk.end)
            end = start + chunk.length
            # NumPy takes twice as long to read a list
            struct.pack_into(f"{chunk.length}i", arrays["token"], start * INT32_BYTES, *tokens)
            arrays["position"][start:end] = np.arange(chunk.start, chunk.end)
            arrays["row"][start:end] = row
            arrays["start"][row], arrays["length"][row] = start, chunk.length
            _fill_row(arrays, row, chunk)
            _fill_params(self._params, row, chunk.request, eos_ids)
            start = end


def _fill_row(arrays: dict[str, np.ndarray], row: int, chunk: Chunk) -> None:
    """A chunk carries its request's whole slot, so a recycled slot keeps nothing of its last
    request."""
    request = chunk.request
    arrays["slot"][row] = request.slot
    arrays["kv_length"][row] = chunk.start + chunk.length
    arrays["kept"][row] = request.kept
    arrays["final"][row] = chunk.final
    arrays["remaining"][row] = request.max_tokens - len(request.output)
    arrays["min_left"][row] = max(0, request.params.min_tokens - len(request.output))
    width = arrays["table"].shape[1] // len(request.tables)
    for group, table in enumerate(request.tables):
        arrays["table"][row, group * width : group * width + len(table.pages)] = table.pages


def _fill_params(
    columns: dict[str, np.ndarray], row: int, request: Request, eos_ids: Sequence[int]
) -> None:
    params = request.params
    stops = stop_ids(params.stop_token_ids, () if params.ignore_eos else eos_ids)
    columns["prompt_length"][row] = len(request.prompt)
    columns["processed"][row] = request.logits_options is not None
    for name, column in COLUMNS.items():
        columns[name][row] = column.encode(getattr(params, name))
    columns["key"][row] = request.seed & 0xFFFFFFFF, request.seed >> 32
    if stops:
        columns["stop_ids"][row, : len(stops)] = stops


def stop_ids(own: Sequence[int] | None, eos_ids: Sequence[int]) -> list[int]:
    """Every id that ends a request: its own and the model's."""
    return list(dict.fromkeys([*(own or ()), *eos_ids]))
