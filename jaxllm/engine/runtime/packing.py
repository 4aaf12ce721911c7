"""Host arrays of a step as one int32 buffer, packed on the host and unpacked on the device; prompt
chunks above all."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
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
# Of each chunk, in the order of the buffer
PER_CHUNK = "slot", "start", "length", "kv_length", "kept", "final", "remaining", "min_left"
_CODES: Mapping[type, str] = {np.int32: "i", np.bool: "i", np.float32: "f", np.uint32: "I"}
# What a row of SLOT_PARAMS holds before `stop_ids`
_PARAMS = struct.Struct(
    "".join(
        (place.stop - place.start) * _CODES[dtype]
        for name, (place, dtype) in SLOT_PARAMS.items()
        if name != "stop_ids"
    )
)


class Layout:
    """Places of arrays in one buffer, computed once for the steps that share it.

    Attributes:
        shapes: shape and type of each array by name.
        spans: its elements of the buffer.
        size: elements of the buffer.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.spans = dict[str, slice]()
        self.size = 0
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
            if len(shape) == 1:
                found[name] = part
            else:
                found[name] = part.reshape(shape)
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
        logit_rows: rows of logits of the step. Padded, so that few sampling programs serve all
            shapes; less than B + R where no step uses so many.
    """

    shape: ExtendShape
    table_width: int
    logit_rows: int

    @property
    def closes_gaps(self) -> bool:
        """As of `Buckets`."""
        return self.logit_rows < self.shape.decodes + self.shape.chunks

    @functools.cached_property
    def arrays(self) -> Layout:
        """The arrays by name. Per token: its id, position, and chunk row. Per chunk: its slot, its
        first token's index, tokens, tokens with the cached prefix, tokens whose KV exists already,
        whether it samples, and the slot's state."""
        t = self.shape.tokens
        r = self.shape.chunks
        ints: Shapes = dict.fromkeys(("token", "position", "row"), ((t,), np.int32))
        ints |= dict.fromkeys(PER_CHUNK, ((r,), np.int32))
        params, table = ((r, width) for width in (width_of(SLOT_PARAMS), self.table_width))
        return Layout(ints | {"params": (params, np.int32), "table": (table, np.int32)})

    def pack_chunks(self, buffer: np.ndarray, chunks: Sequence[Chunk], slots: int) -> None:
        """Write these chunks into a zeroed buffer. Padding rows use the trash slot, padding tokens
        row R."""
        views = ChunkViews(self, buffer)
        views.pad(slots)
        views.write(chunks)


class ChunkViews:
    """The arrays of a layout in one buffer, to pack chunks into.

    NumPy takes as long for one number as for a row of them, and twice as long as `struct` to read
    a list.
    """

    def __init__(self, layout: ChunkLayout, buffer: np.ndarray):
        self._rows = layout.shape.chunks
        self._arrays = layout.arrays.views(buffer)
        spans = [layout.arrays.spans[name] for name in PER_CHUNK]
        # Arrays of equal sizes stand at equal distances
        self._chunks = buffer[spans[0].start :][: len(spans) * (spans[1].start - spans[0].start)]
        self._chunks = self._chunks.reshape(len(spans), -1)

    def pad(self, slots: int) -> None:
        """Make a zeroed buffer one without chunks."""
        self._arrays["row"][:] = self._rows
        self._arrays["slot"][:] = slots
        host_columns(self._arrays["params"], SLOT_PARAMS)["stop_ids"][:] = -1

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Write chunks into a buffer without any."""
        arrays = self._arrays
        start = 0
        for row, chunk in enumerate(chunks):
            end = start + chunk.length
            _write_ints(arrays["token"], start, chunk.request.tokens(chunk.start, chunk.end))
            arrays["position"][start:end] = np.arange(chunk.start, chunk.end)
            arrays["row"][start:end] = row
            self._write_slot(row, start, chunk)
            _write_params(arrays["params"], row, chunk.request)
            start = end

    def _write_slot(self, row: int, start: int, chunk: Chunk) -> None:
        """A chunk carries its request's whole slot, so a recycled slot keeps nothing of its last
        request."""
        request = chunk.request
        done = len(chunk.request.output)
        self._chunks[:, row] = (
            request.slot,
            start,
            chunk.length,
            chunk.end,
            request.kept,
            chunk.final,
            request.max_tokens - done,
            max(0, request.params.min_tokens - done),
        )
        matrix = self._arrays["table"]
        width = matrix.shape[1] // len(request.tables)
        for group, table in enumerate(request.tables):
            assert len(table.pages) <= width, "pages would go into the next row"
            _write_ints(matrix, row * matrix.shape[1] + group * width, table.pages)


def _write_ints(array: np.ndarray, start: int, values: Sequence[int]) -> None:
    """Write numbers from element `start` of the whole array on."""
    struct.pack_into(f"{len(values)}i", array, start * INT32_BYTES, *values)


def _write_params(matrix: np.ndarray, row: int, request: Request) -> None:
    params = request.params
    start = row * matrix.shape[1]
    _PARAMS.pack_into(
        matrix,
        start * INT32_BYTES,
        len(request.prompt.tokens),
        request.logits_options is not None,
        *[column.encode(getattr(params, name)) for name, column in COLUMNS.items()],
        request.seed & 0xFFFFFFFF,
        request.seed >> 32,
    )
    if request.stops:
        stops = sorted(request.stops)
        columns = SLOT_PARAMS["stop_ids"][0]
        assert len(stops) <= columns.stop - columns.start, "stop ids would go into other columns"
        _write_ints(matrix, start + columns.start, stops)
