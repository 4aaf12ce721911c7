"""The two ends of a forward: how rows enter the layers of a stage, and what leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from jaxllm.engine.runtime.packing import ChunkLayout
from jaxllm.engine.runtime.program import Resident
from jaxllm.engine.runtime.programs.step_rows import StepRows
from jaxllm.engine.runtime.shapes import Model
from jaxllm.engine.runtime.state import ForwardOutput
from jaxllm.nn.blocks import Carry


class Enter(Protocol):
    """How rows enter the first layer of a stage.

    Attributes:
        takes: shapes of what it is handed, see `Variant.takes`.
    """

    @property
    def takes(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...

    def __call__(self, module: nnx.Module, rows: StepRows, *handed: Array) -> Carry:
        """What the first layer gets."""


class Leave(Protocol):
    """What leaves the last layer of a stage.

    Attributes:
        takes: arrays whose buffers it reuses, see `Variant.takes`.
        gives: what it makes, see `Variant.gives`.
        prefix: of the names of such forwards.
    """

    @property
    def takes(self) -> tuple[Resident, ...]: ...

    @property
    def gives(self) -> tuple[Any, ...]: ...

    @property
    def prefix(self) -> str: ...

    def __call__(
        self, model: Model, module: nnx.Module, carry: Carry, rows: StepRows, *reused: Any
    ) -> tuple[Any, ...]:
        """What it gives, of the carry after the last attention."""


@dataclass(frozen=True)
class Embed:
    """Tokens enter the first stage."""

    takes: tuple[jax.ShapeDtypeStruct, ...] = ()

    def __call__(self, module: nnx.Module, rows: StepRows) -> Carry:
        """As of `Enter`."""
        return module.embedded(rows.facts, rows.context)


@dataclass(frozen=True)
class Receive:
    """What the stage before has handed on enters a later one."""

    shape: jax.ShapeDtypeStruct

    @property
    def takes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """As of `Enter`."""
        return (self.shape,)

    def __call__(self, module: nnx.Module, rows: StepRows, handed_TD: Array) -> Carry:
        """As of `Enter`."""
        return Carry(handed_TD, facts=rows.facts)


@dataclass(frozen=True)
class HandOn:
    """A stage before the last hands on the hidden states of every row, [T, D]."""

    replicated: NamedSharding
    takes: tuple[Resident, ...] = ()
    prefix: str = "hand_"

    @property
    def gives(self) -> tuple[Any, ...]:
        """As of `Leave`."""
        return (self.replicated,)

    def __call__(
        self, model: Model, module: nnx.Module, carry: Carry, rows: StepRows
    ) -> tuple[Array]:
        """As of `Leave`."""
        return (module.handed(carry, rows.context),)


@dataclass(frozen=True)
class Logits:
    """Logits of `rows` decode rows, in the buffers of as many as have `logit_rows`."""

    rows: int
    logit_rows: int
    prefix: str = ""

    @property
    def takes(self) -> tuple[Resident, ...]:
        """The output of the last forward: its buffers, and the logits of the rows beyond."""
        return (Resident("forward_output", self.logit_rows),)

    @property
    def gives(self) -> tuple[Any, ...]:
        """As of `Leave`."""
        return self.takes

    def __call__(
        self,
        model: Model,
        module: nnx.Module,
        carry: Carry,
        rows: StepRows,
        reused: ForwardOutput,
    ) -> tuple[ForwardOutput]:
        """As of `Leave`."""
        hidden = module.after_attention(carry, rows.context)
        spare = self.logit_rows - self.rows
        trash = rows.trash_slot
        slots = jnp.pad(rows.decodes.slots, (0, spare), constant_values=trash)
        logits = module.logits(hidden, rows.context)
        logits = jax.lax.dynamic_update_slice(reused.logits, logits, (0, 0))
        return (ForwardOutput(logits, slots, jnp.pad(rows.decodes.alive, (0, spare))),)


@dataclass(frozen=True)
class LastLogits:
    """Logits of the decode rows and of the last token of each chunk.

    After the last attention layer, only these rows continue. The carry of the chunk tokens stays in
    `hidden_states`, which serves all shapes.
    """

    layout: ChunkLayout
    prefix: str = ""

    @property
    def takes(self) -> tuple[Resident, ...]:
        """Buffers of the output and of the carry."""
        return (Resident("forward_output", self.layout.logit_rows), Resident("hidden_states"))

    @property
    def gives(self) -> tuple[Any, ...]:
        """As of `Leave`."""
        return self.takes

    def __call__(
        self,
        model: Model,
        module: nnx.Module,
        carry: Carry,
        rows: StepRows,
        reused: ForwardOutput,
        hidden_states: Array,
    ) -> tuple[ForwardOutput, Array]:
        """As of `Leave`."""
        picked, slots, emit = self._logit_rows(rows)
        hidden = module.after_attention(carry.rows(picked), rows.context)
        hidden_states = jax.lax.dynamic_update_slice(
            hidden_states, carry.packed(model.collective)[self.layout.shape.decodes :], (0, 0)
        )
        return ForwardOutput(module.logits(hidden, rows.context), slots, emit), hidden_states

    def _logit_rows(self, rows: StepRows) -> tuple[Array, Array, Array]:
        """Of each row of logits: the token whose hidden state it is made of, its slot, and whether
        a token is drawn from it."""
        shape = self.layout.shape
        batch = rows.batch
        decode_slots = rows.decodes.slots
        unused = rows.trash_slot
        last = shape.decodes + jnp.maximum(batch["start"] + batch["length"] - 1, 0)
        spare = max(0, self.layout.logit_rows - shape.decodes - shape.chunks)
        trash = jnp.full((spare,), unused, jnp.int32)
        picked = jnp.concatenate(
            [jnp.arange(shape.decodes, dtype=jnp.int32), last, jnp.zeros_like(trash)]
        )
        slots = jnp.concatenate([decode_slots, batch["slot"], trash])
        emit = jnp.concatenate(
            [rows.decodes.alive, batch["final"] != 0, jnp.zeros((spare,), jnp.bool_)]
        )
        if not self.layout.closes_gaps:
            return picked, slots, emit
        decodes = jnp.sum(decode_slots < unused)
        chunks = jnp.sum(batch["slot"] < unused)
        row = jnp.arange(self.layout.logit_rows, dtype=jnp.int32)
        is_used = row < decodes + chunks
        place = jnp.where(row < decodes, row, row + shape.decodes - decodes)
        place = jnp.where(is_used, place, 0)
        return picked[place], jnp.where(is_used, slots[place], unused), emit[place] & is_used
