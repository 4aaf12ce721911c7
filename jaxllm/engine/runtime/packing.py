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


def offsets(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Start of each array in the buffer, and the buffer's size, in elements."""
    starts, end = {}, 0
    for name, (shape, _) in shapes.items():
        starts[name] = end
        end += -(-math.prod(shape) // ALIGN) * ALIGN
    return starts, end


def packed_size(shapes: Shapes) -> int:
    """Elements of the buffer."""
    return offsets(shapes)[1]


def pack(arrays: dict[str, np.ndarray], shapes: Shapes) -> np.ndarray:
    """One flat int32 buffer; float32 and uint32 keep their bits."""
    starts, size = offsets(shapes)
    buffer = np.zeros(size, np.int32)
    for name, start in starts.items():
        flat = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.int32)
        buffer[start : start + flat.size] = flat
    return buffer


def views(buffer: np.ndarray, shapes: Shapes) -> dict[str, np.ndarray]:
    """Writable views of the arrays of `pack` in a buffer."""
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
        end = starts[name] + math.prod(shape)
        part = jax.lax.slice(buffer, (starts[name],), (end,)).reshape(shape)
        if dtype is not np.int32:
            part = jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
        out[name] = part
    return out
