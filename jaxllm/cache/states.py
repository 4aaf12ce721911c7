"""Recurrent states: one for every slot, which each token of the slot's request changes in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.cache.layer import RecurrentState
from jaxllm.mesh import LAYER, layer_devices

# The arrays of one state
type State = tuple[Array, ...]


class Cell(Protocol):
    """What changes a state token by token. Pure: weights are the cell's own."""

    @property
    def spec(self) -> RecurrentState:
        """The whole state; a device may have its share alone."""

    def __call__(self, state: State, row: Any) -> tuple[State, Any]:
        """The state after one more token, of which `row` tells, and what comes of the token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateArrays:
    """The states of one cache group, in S slots and a last one for rows that are padding.

    Attributes:
        arrays: Of each array of a state, those of all layers and slots `[L, S + 1, ...]`.
        layers: L.
    """

    arrays: State
    layers: int = field(default=1, metadata={"static": True})

    @staticmethod
    def abstract(spec: RecurrentState, layers: int, slots: int, mesh: Mesh) -> StateArrays:
        """The states of S = `slots` slots, as ShapeDtypeStructs with shardings.

        Raises ValueError when the first axis of a state's array does not divide over the devices.
        """
        shards = layer_devices(mesh)
        place = NamedSharding(mesh, PartitionSpec(None, None, LAYER))
        for shape in spec.shapes:
            if shape[0] % shards:
                raise ValueError(
                    f"a recurrent state of {shape[0]} heads cannot be split over {shards} devices"
                )
        arrays = tuple(
            jax.ShapeDtypeStruct((layers, slots + 1, *shape), jnp.dtype(spec.dtype), sharding=place)
            for shape in spec.shapes
        )
        return StateArrays(arrays, layers)

    def read(self, index: int, slots: Array) -> State:
        """The states of these slots of a layer, which has this index among the L."""
        states = tuple(_flat(array)[self._rows(index, slots)] for array in self.arrays)
        # Read for once, before they are overwritten in place: who reads later would need a copy
        return lax.optimization_barrier(states)

    def write(self, index: int, slots: Array, states: State) -> StateArrays:
        """The same with other states in these slots of a layer."""
        rows = self._rows(index, slots)
        arrays = tuple(
            _flat(array).at[rows].set(state.astype(array.dtype)).reshape(array.shape)
            for array, state in zip(self.arrays, states, strict=True)
        )
        return replace(self, arrays=arrays)

    def _rows(self, index: int, slots: Array) -> Array:
        """Indices of the first axis: scattering along another one makes XLA for GPUs change the
        layout of the whole array and back."""
        return index * self.arrays[0].shape[1] + slots


def _flat(array: Array) -> Array:
    """`[L, S + 1, ...]` as `[L·(S + 1), ...]`."""
    return array.reshape(-1, *array.shape[2:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateInputs:
    """Whose states a step changes: B decode tokens, then the tokens of R ragged chunks; either part
    may be empty. Rows that are not in use have the last slot.

    Attributes:
        decode_slots_B: The slot of each decode row.
        chunk_slots_R: The slot of each chunk.
        chunk_begins_R: Whether a chunk begins its sequence, so that its state begins as zeros.
        chunk_row_T: The chunk of each chunk token; R for padding.
    """

    decode_slots_B: Array
    chunk_slots_R: Array
    chunk_begins_R: Array
    chunk_row_T: Array


def state_bytes(spec: RecurrentState) -> int:
    """Bytes of one state of one layer, on all devices together."""
    return sum(map(math.prod, spec.shapes)) * jnp.dtype(spec.dtype).itemsize


def scan_step(
    arrays: StateArrays, index: int, cell: Cell, rows: Any, inputs: StateInputs
) -> tuple[Any, StateArrays]:
    """What `cell` gives for the tokens of a step, whose `rows` are a tree of `[T, ...]`, and the
    states after them."""
    B = inputs.decode_slots_B.shape[0]
    T = B + inputs.chunk_row_T.shape[0]
    outputs = []
    if B:
        states = arrays.read(index, inputs.decode_slots_B)
        states, output = jax.vmap(cell)(states, jax.tree.map(lambda x: x[:B], rows))
        arrays = arrays.write(index, inputs.decode_slots_B, states)
        outputs.append(output)
    if T > B:
        states = arrays.read(index, inputs.chunk_slots_R)
        states = tuple(_begun(state, inputs.chunk_begins_R) for state in states)
        chunk_rows = jax.tree.map(lambda x: x[B:], rows)
        states, output = scan_chunks(cell, states, chunk_rows, inputs.chunk_row_T)
        arrays = arrays.write(index, inputs.chunk_slots_R, states)
        outputs.append(output)
    if len(outputs) == 1:
        return outputs[0], arrays
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), arrays


def scan_chunks(cell: Cell, states: State, rows: Any, row_T: Array) -> tuple[State, Any]:
    """The `states` `[R, ...]` of R sequences after the tokens of `rows`, and what `cell` gives for
    these; token t belongs to sequence `row_T[t]`, or to none if that is R."""
    # One more state, for padding
    states = tuple(jnp.pad(state, [(0, 1)] + [(0, 0)] * (state.ndim - 1)) for state in states)

    def advance(states: State, token: tuple[Array, Any]) -> tuple[State, Any]:
        number, row = token
        changed, output = cell(tuple(state[number] for state in states), row)
        written = (
            state.at[number].set(new.astype(state.dtype))
            for state, new in zip(states, changed, strict=True)
        )
        return tuple(written), output

    states, output = lax.scan(advance, states, (row_T, rows))
    return tuple(state[:-1] for state in states), output


def scan_tokens(cell: Cell, rows: Any, begins_T: Array) -> Any:
    """What `cell` gives for sequences one after the other, each of which begins where `begins_T`
    says so."""
    dtype = jnp.dtype(cell.spec.dtype)
    zeros = tuple(jnp.zeros(shape, dtype) for shape in cell.spec.shapes)

    def advance(state: State, token: tuple[Array, Any]) -> tuple[State, Any]:
        begins, row = token
        state = tuple(jnp.where(begins, jnp.zeros_like(array), array) for array in state)
        new, output = cell(state, row)
        return tuple(array.astype(dtype) for array in new), output

    return lax.scan(advance, zeros, (begins_T, rows))[1]


def _begun(state_R: Array, begins_R: Array) -> Array:
    """The states, zeros for sequences that begin."""
    begins = begins_R.reshape(-1, *(1,) * (state_R.ndim - 1))
    return jnp.where(begins, jnp.zeros_like(state_R), state_R)
