"""What persists between steps, resident on the device: one entry per slot, plus a trash slot that
padding rows use.

Each array that a program takes over and returns costs the host some microseconds of every step, so
what belongs together lies in one matrix, in columns of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_STOP_IDS = 80  # stop_token_ids (64) plus the model's end-of-sequence ids

type Columns = Mapping[str, tuple[slice, type]]


def _columns(**sizes: tuple[int, type]) -> Columns:
    """Columns side by side, of so many elements each."""
    found, end = {}, 0
    for name, (width, dtype) in sizes.items():
        found[name] = slice(end, end + width), dtype
        end += width
    return MappingProxyType(found)


# How far a request is. `token` is the last sampled token and `position` where its KV will be
# written; while a prompt is being computed, `position` is that of the last computed token. `alive`:
# generates at the next decode step. `remaining` and `min_left` count the tokens left before
# max_tokens, and before a stop id may end it.
PROGRESS = _columns(
    token=(1, np.int32),
    position=(1, np.int32),
    alive=(1, np.bool),
    remaining=(1, np.int32),
    min_left=(1, np.int32),
)
# What a request asks for. `key`: the halves of its seed; `stop_ids`: padded with -1; `processed`:
# it asks something of `process`.
SLOT_PARAMS = _columns(
    prompt_length=(1, np.int32),
    processed=(1, np.bool),
    temperature=(1, np.float32),
    top_p=(1, np.float32),
    min_p=(1, np.float32),
    top_k=(1, np.int32),
    key=(2, np.uint32),
    stop_ids=(MAX_STOP_IDS, np.int32),
)


def width_of(columns: Columns) -> int:
    """Of a matrix with these columns."""
    return max(place.stop for place, _ in columns.values())


def named(matrix_RW: np.ndarray, columns: Columns) -> dict[str, np.ndarray]:
    """A host matrix's columns by name, to be written in place; booleans as int32."""
    return {
        name: matrix_RW[:, place].view(np.int32 if dtype is np.bool else dtype)
        for name, (place, dtype) in columns.items()
    }


def columns_of(matrix_RW: Array, columns: Columns) -> dict[str, Array]:
    """A matrix's columns by name inside a compiled program: `[R]`, or `[R, n]` where one is n
    wide."""
    found = {}
    for name, (place, dtype) in columns.items():
        part = matrix_RW[:, place] if place.stop - place.start > 1 else matrix_RW[:, place.start]
        found[name] = (
            part != 0
            if dtype is np.bool
            else part
            if dtype is np.int32
            else jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
        )
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """S usable slots and the trash slot S. `rows` maps decode rows to slots."""

    progress: Array  # [S+1, …] int32, columns PROGRESS
    asks: Array  # [S+1, …] int32, columns ASKS
    table: Array  # [S+1, M] int32, pages of the slot
    rows: Array  # [S] int32

    @staticmethod
    def shapes(slots: int, table_width: int) -> SlotState:
        """The state as ShapeDtypeStructs."""
        progress, asks, table = (
            jax.ShapeDtypeStruct((slots + 1, width), jnp.int32)
            for width in (width_of(PROGRESS), width_of(SLOT_PARAMS), table_width)
        )
        return SlotState(progress, asks, table, jax.ShapeDtypeStruct((slots,), jnp.int32))

    @staticmethod
    def zeros(slots: int, table_width: int) -> SlotState:
        """A state in which every row is padding, as numpy arrays."""
        state = jax.tree.map(
            lambda s: np.zeros(s.shape, s.dtype), SlotState.shapes(slots, table_width)
        )
        state.rows[:] = slots
        return state
