"""What persists between steps, resident on the device: one entry per slot, plus a trash slot that padding rows use."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_STOP_IDS = 80  # stop_token_ids (64) plus the model's end-of-sequence ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """S usable slots and the trash slot S. `token` is the last sampled token and `position` where its KV will be written; while a
    prompt is being computed, `position` is that of the last computed token. `rows` maps decode rows to slots."""

    token: Array  # [S+1] int32
    position: Array  # [S+1] int32
    prompt_length: Array  # [S+1] int32
    table: Array  # [S+1, M] int32, pages of the slot
    alive: Array  # [S+1] bool: generates at the next decode step
    remaining: Array  # [S+1] int32, tokens left before max_tokens
    min_left: Array  # [S+1] int32, tokens left before a stop id may end it
    stop_ids: Array  # [S+1, K] int32, padded with -1
    temperature: Array  # [S+1] float32
    top_p: Array  # [S+1] float32
    min_p: Array  # [S+1] float32
    top_k: Array  # [S+1] int32
    key: Array  # [S+1, 2] uint32, the halves of the request's seed
    processed: Array  # [S+1] bool: the request asks something of `process`
    rows: Array  # [S] int32

    @staticmethod
    def shapes(slots: int, table_width: int) -> SlotState:
        """The state as ShapeDtypeStructs."""

        def shape(dtype: jnp.dtype, *rest: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((slots + 1, *rest), dtype)

        i32, f32 = jnp.int32, jnp.float32
        return SlotState(
            token=shape(i32),
            position=shape(i32),
            prompt_length=shape(i32),
            table=shape(i32, table_width),
            alive=shape(jnp.bool_),
            remaining=shape(i32),
            min_left=shape(i32),
            stop_ids=shape(i32, MAX_STOP_IDS),
            temperature=shape(f32),
            top_p=shape(f32),
            min_p=shape(f32),
            top_k=shape(i32),
            key=shape(jnp.uint32, 2),
            processed=shape(jnp.bool_),
            rows=jax.ShapeDtypeStruct((slots,), i32),
        )

    @staticmethod
    def zeros(slots: int, table_width: int) -> SlotState:
        """A state in which every row is padding, as numpy arrays."""
        state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), SlotState.shapes(slots, table_width))
        state.rows[:] = slots
        return state


SLOT_FIELDS = tuple(f.name for f in fields(SlotState) if f.name != "rows")
