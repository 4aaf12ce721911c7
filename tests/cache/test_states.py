"""Recurrent states by slot: what a step reads, changes and leaves alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.arrays import Zeros
from jaxllm.cache.groups import Place
from jaxllm.cache.kv import PagedContext
from jaxllm.cache.states import StateArrays, StateInputs, state_bytes
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from tests.hybrid import HEADS, NUMBERS, Decay

LAYERS, SLOTS = 2, 5
TRASH = SLOTS
ints = functools.partial(np.array, dtype=np.int32)


def empty(slots: int = SLOTS) -> StateArrays:
    return Zeros()(StateArrays.abstract(Decay.spec, LAYERS, slots, make_mesh(1)))


def rows(tokens: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (tokens, HEADS, NUMBERS))


@jax.jit
def step(states: StateArrays, inputs: StateInputs, row_T: Any) -> tuple[Any, StateArrays]:
    """Two layers, of which the second one reads what the first gives."""
    context = PagedContext((states,), (Place(0, 0), Place(0, 1)), [inputs], "reference")
    first = context.scan(0, Decay(), row_T)
    return context.scan(1, Decay(), first), context.kv[0]


def dense(row_T: Any, segment_T: Any = None) -> Any:
    context = DenseContext(segment_T)
    return context.scan(1, Decay(), context.scan(0, Decay(), row_T))


def inputs(
    decodes: tuple[int, ...], chunks: tuple[tuple[int, int, bool], ...], padding: int = 0
) -> StateInputs:
    """Of a step: slots of decode rows, then chunks of (slot, tokens, whether it begins)."""
    row = [index for index, (_, tokens, _) in enumerate(chunks) for _ in range(tokens)]
    return StateInputs(
        decode_slots_B=ints(decodes),
        chunk_slots_R=ints([slot for slot, _, _ in chunks]),
        chunk_begins_R=np.array([begins for *_, begins in chunks], bool),
        chunk_row_T=ints([*row, *[len(chunks)] * padding]),
    )


def test_chunks_and_decodes_give_what_a_whole_sequence_gives() -> None:
    first, second = rows(9, 1), rows(6, 2)
    states, parts = empty(), {0: [], 1: []}
    # First 5 of one, 2 of the other; then 2 and 3; then a token each
    for (one, other), begins in zip(((5, 2), (2, 3)), (True, False), strict=True):
        done = [sum(len(part) for part in parts[index]) for index in (0, 1)]
        taken = jnp.concatenate(
            [first[done[0] : done[0] + one], second[done[1] : done[1] + other], rows(3, 9)]
        )
        out, states = step(states, inputs((), ((3, one, begins), (1, other, begins)), 3), taken)
        parts[0].append(out[:one])
        parts[1].append(out[one : one + other])
    for token in range(2):
        slots, taken = (3,), first[7 + token][None]
        if token == 0:
            slots, taken = (3, 1), jnp.stack([first[7], second[5]])
        out, states = step(states, inputs(slots, ()), taken)
        parts[0].append(out[:1])
        parts[1].append(out[1:])
    for index, sequence in enumerate((first, second)):
        np.testing.assert_allclose(jnp.concatenate(parts[index]), dense(sequence), rtol=1e-5)


def test_decodes_and_chunks_of_one_step_keep_apart() -> None:
    first, second = rows(4, 1), rows(5, 2)
    _, states = step(empty(), inputs((), ((0, 3, True),)), first[:3])
    out, _ = step(
        states, inputs((0, TRASH), ((4, 5, True),)), jnp.concatenate([first[3:], first[:1], second])
    )
    np.testing.assert_allclose(out[0], dense(first)[3], rtol=1e-5)
    np.testing.assert_allclose(out[2:], dense(second), rtol=1e-5)


def test_other_slots_stay_and_one_that_begins_anew_starts_from_zeros() -> None:
    states = jax.tree.map(lambda x: jnp.full_like(x, 7.0), empty())
    sequence = rows(3, 1)
    out, after = step(states, inputs((), ((2, 3, True),)), sequence)
    np.testing.assert_allclose(out, dense(sequence), rtol=1e-5)
    for array in after.arrays:
        assert (np.asarray(array)[:, [0, 1, 3, 4]] == 7).all()
        assert (np.asarray(array)[:, 2] != 7).any()


def test_packed_sequences_are_apart_in_a_dense_context() -> None:
    first, second = rows(4, 1), rows(3, 2)
    found = dense(jnp.concatenate([first, second]), jnp.array([0] * 4 + [1] * 3))
    np.testing.assert_allclose(found[:4], dense(first), rtol=1e-5)
    np.testing.assert_allclose(found[4:], dense(second), rtol=1e-5)


def test_states_are_donated_and_changed_in_place() -> None:
    like = StateArrays.abstract(Decay.spec, LAYERS, 4096, make_mesh(1))
    size = sum(array.size * 4 for array in like.arrays)
    assert size == LAYERS * 4097 * state_bytes(Decay.spec)
    given = inputs((0, 1), ((4, 5, True),))
    lowered = jax.jit(step.__wrapped__, donate_argnums=0).lower(like, given, rows(7, 1))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 4


def test_a_state_that_does_not_divide_over_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="a recurrent state of 4 heads cannot be split over 8"):
        StateArrays.abstract(Decay.spec, LAYERS, SLOTS, make_mesh(8))
