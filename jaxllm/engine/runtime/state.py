"""Device-resident state of the requests that run, one row per slot, and how programs read it.

There are S usable slots and the trash slot S, which padding rows use. Every array that a program
takes and returns costs the host microseconds a step, so columns of 32 bits share one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.sampling.options import COLUMNS

MAX_STOP_IDS = 80  # stop_token_ids (64) plus the model's end-of-sequence ids

type Columns = Mapping[str, tuple[slice, type]]


def _columns(**sizes: tuple[int, type]) -> Columns:
    """Columns side by side, by name: (width in elements, dtype)."""
    found = {}
    end = 0
    for name, (width, dtype) in sizes.items():
        found[name] = slice(end, end + width), dtype
        end += width
    return MappingProxyType(found)


# Progress of a request:
#   token      last sampled token
#   position   where its KV will be written; during prefill, position of the last computed token
#   alive      generates at the next decode step
#   remaining  tokens left before max_tokens
#   min_left   tokens left before a stop id may end the request
PROGRESS = _columns(
    token=(1, np.int32),
    position=(1, np.int32),
    alive=(1, np.bool),
    remaining=(1, np.int32),
    min_left=(1, np.int32),
)
# Sampling parameters of a request:
#   processed  its logits go through `process_logits`
#   key        the halves of its 64-bit seed
#   stop_ids   padded with -1
# and the options that are one number. An adapter's column would stand here.
SLOT_PARAMS = _columns(
    prompt_length=(1, np.int32),
    processed=(1, np.bool),
    **{name: (1, column.dtype) for name, column in COLUMNS.items()},
    key=(2, np.uint32),
    stop_ids=(MAX_STOP_IDS, np.int32),
)


def width_of(columns: Columns) -> int:
    """Width of a matrix with these columns."""
    return max(place.stop for place, _ in columns.values())


def host_columns(matrix_RW: np.ndarray, columns: Columns) -> dict[str, np.ndarray]:
    """Writable views of a host matrix's columns by name; booleans as int32."""
    found = {name: matrix_RW[:, place] for name, (place, _) in columns.items()}
    for name, (_, dtype) in columns.items():
        if dtype not in (np.int32, np.bool):
            found[name] = found[name].view(dtype)
    return found


def device_columns(matrix_RW: Array, columns: Columns) -> dict[str, Array]:
    """A matrix's columns by name inside a compiled program: `[R]`, or `[R, n]` for width n."""
    found = {}
    for name, (place, dtype) in columns.items():
        if place.stop - place.start > 1:
            part = matrix_RW[:, place]
        else:
            part = matrix_RW[:, place.start]
        if dtype is np.bool:
            part = part != 0
        elif dtype is not np.int32:
            part = jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
        found[name] = part
    return found


def pack_progress(**columns: Array) -> Array:
    """Rows of `SlotState.progress` from its columns by name."""
    return jnp.stack([columns[name].astype(jnp.int32) for name in PROGRESS], axis=1)


class SlotState(NamedTuple):
    """State of all slots.

    Attributes:
        progress: [S+1, …] int32, columns PROGRESS.
        params: [S+1, …] int32, columns SLOT_PARAMS.
        table: [S+1, M] int32, page tables of all cache groups side by side.
        rows: [S] int32, the slot of each decode row.
    """

    progress: Array
    params: Array
    table: Array
    rows: Array

    @staticmethod
    def shapes(slots: int, table_width: int) -> SlotState:
        """The state as ShapeDtypeStructs."""
        progress, params, table = (
            jax.ShapeDtypeStruct((slots + 1, width), jnp.int32)
            for width in (width_of(PROGRESS), width_of(SLOT_PARAMS), table_width)
        )
        return SlotState(progress, params, table, jax.ShapeDtypeStruct((slots,), jnp.int32))

    @staticmethod
    def zeros(slots: int, table_width: int) -> SlotState:
        """A state in which every row is padding, as numpy arrays."""
        state = jax.tree.map(
            lambda s: np.zeros(s.shape, s.dtype), SlotState.shapes(slots, table_width)
        )
        state.rows[:] = slots
        return state


class ForwardOutput(NamedTuple):
    """Result of a forward for sampling: B decode rows, R chunk rows, then padding, Q rows in all.

    Every forward with Q rows writes into the buffers of the last one. Their addresses stay, and so
    recorded command buffers stay valid.

    Attributes:
        logits: [Q, V] float32; any finite values in padding rows.
        slots: [Q] int32.
        emit: [Q] bool, whether the row samples a token.
    """

    logits: Array
    slots: Array
    emit: Array
