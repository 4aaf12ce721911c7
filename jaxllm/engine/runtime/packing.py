"""Host arrays of a step as one int32 buffer: packed on the host, unpacked on the device."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

type Shapes = dict[str, tuple[tuple[int, ...], type]]

# Elements: kernels may get a view into the buffer, and ask for an alignment of 256 bytes
ALIGN = 64


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
