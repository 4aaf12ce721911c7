"""The thread block of one row: how its warpgroups exchange scalars and stream the row's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = 128
KEPT = 3  # largest logits that are kept of each slot
# Most candidates of a round under top_p. At top_p 0.9, all three are rejected once in a thousand
# rounds.
CANDIDATES = 3


class Tuning(NamedTuple):
    """Sizes that change speed. They also change the slots, and so which token a key draws.

    Attributes:
      groups: warpgroups of a block.
      lines: lines of 128 logits in a chunk.
      stages: chunks in a warpgroup's ring of copies.
    """

    groups: int = 4
    lines: int = 8
    stages: int = 6


class Spec(NamedTuple):
    """Static parameters of a compiled kernel.

    Attributes:
      B: rows.
      V: logits of a row.
      banned: columns of the table of banned tokens.
      tuning: sizes.
      interpret: a `plgpu.InterpretGPUParams`, or None on a card.
    """

    B: int
    V: int
    banned: int
    tuning: Tuning
    interpret: Any

    @property
    def size(self) -> int:
        """Logits in a chunk, which is also the number of slots of a warpgroup."""
        return self.tuning.lines * COLUMNS

    @property
    def candidates(self) -> int:
        """Candidates of a round; a warpgroup draws each within its slot."""
        return min(CANDIDATES, self.tuning.groups)

    @property
    def steps(self) -> int:
        """Chunks of one warpgroup. Logits beyond the row's end are masked."""
        return -(-self.V // (self.size * self.tuning.groups))


class Block:
    """The thread block of one row. All its warpgroups call each method together, and scalars that a
    method returns are the same in all of them.

    Attributes:
      spec: static parameters.
      row, wg: number of the row and of this warpgroup.
      lines: the logits `[B, V / 128, 128]` in device memory.
      banned: banned tokens `[B, K]`; -1 = none.
      bans: leading columns of `banned` that this row uses.
      rate: log2(e) / temperature, a factor of logits.
      sm: arrays in shared memory, by name.
    """

    def __init__(
        self,
        spec: Spec,
        row: Array,
        wg: Array,
        lines: Any,
        banned: Any,
        bans: Array,
        rate: Array,
        sm: dict[str, Any],
    ):
        self.spec = spec
        self.row = row
        self.wg = wg
        self.lines = lines
        self.banned = banned
        self.bans = bans
        self.rate = rate
        self.sm = sm
        self.shape = (spec.tuning.lines, COLUMNS)

    def sync(self) -> None:
        """A barrier of all warpgroups: writes to shared memory before it are visible after it."""
        plgpu.barrier_arrive(self.sm["sync"])
        plgpu.barrier_wait(self.sm["sync"])

    def broadcast(self, work: Callable[[], tuple[Array, ...]], *types: Any) -> tuple[Array, ...]:
        """Scalars of these types that the first warpgroup computes, broadcast to all.

        One warpgroup alone may reduce: Mosaic's reductions to a scalar use scratch memory that all
        warpgroups of a block share.
        """
        boxes = [
            self.sm["floats" if t == jnp.float32 else "ints"].at[i] for i, t in enumerate(types)
        ]
        self.sync()

        @pl.when(self.wg == 0)
        def _() -> None:
            for box, x in zip(boxes, work(), strict=True):
                box[...] = x

        self.sync()
        return tuple(box[...] for box in boxes)

    def own(self, name: str, *index: Any) -> Any:
        """This warpgroup's lines of a shared array."""
        lines = self.spec.tuning.lines
        return self.sm[name].at[*index, pl.ds(self.wg * lines, lines)]

    def all_slots(self, name: str, *index: Any) -> Array:
        """The lines of all warpgroups, as one array: every operation costs lowering time."""
        return self.laid_out(self.sm[name].at[*index][...] if index else self.sm[name][...])

    def slots(self, groups: int = 1) -> Array:
        """The number of each slot of one warpgroup, or of `groups` warpgroups."""
        line, column = (
            lax.broadcasted_iota(jnp.int32, (groups * self.shape[0], COLUMNS), i) for i in (0, 1)
        )
        return line * COLUMNS + column

    def laid_out(self, x: Array) -> Array:
        """x in the layout of four neighbouring numbers a thread. One array of a computation gets
        it and Mosaic infers the rest: every named layout costs inference a guess."""
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=4))

    def full(self, value: float, dtype: Any = jnp.float32, groups: int = 1) -> Array:
        """An array of one value for the slots of `groups` warpgroups."""
        return self.laid_out(jnp.full((groups * self.shape[0], COLUMNS), value, dtype))

    def chunk_start(self, step: Array, wg: Array) -> tuple[Array, Array]:
        """The first token of a chunk, and of the copy that holds it. The copy starts earlier where
        the chunk reaches beyond the row's end."""
        wanted = (step * self.spec.tuning.groups + wg) * self.spec.size
        return wanted, jnp.minimum(wanted, self.spec.V - self.spec.size)

    def stream(self, init: Any, update: Callable[[Array, Array, Any], Any]) -> Any:
        """Fold `update(step, x, carry)` over this warpgroup's chunks. x is -inf for banned tokens
        and beyond the row's end."""
        spec = self.spec
        stages = self.spec.tuning.stages

        def copy(step) -> None:  # type: ignore[no-untyped-def]
            slot = lax.rem(step, jnp.int32(stages))
            _, begin = self.chunk_start(step, self.wg)
            source = self.lines.at[
                self.row, pl.ds(lax.div(begin, jnp.int32(COLUMNS)), spec.tuning.lines)
            ]
            plgpu.copy_gmem_to_smem(
                source,
                self.sm["ring"].at[self.wg, slot],
                self.sm["full"].at[self.wg * stages + slot],
            )

        plgpu.commit_smem()  # the last pass has read the slots that the first copies overwrite
        pl.loop(0, min(stages, spec.steps))(copy)

        def fold_chunk(step, carry):  # type: ignore[no-untyped-def]
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(self.sm["full"].at[self.wg * stages + slot])
            x = self.sm["ring"].at[self.wg, slot][...]
            plgpu.commit_smem()
            pl.when(step + stages < spec.steps)(lambda: copy(step + stages))
            wanted, begin = self.chunk_start(step, self.wg)

            def hide(i, x):  # type: ignore[no-untyped-def]
                """Mask the i-th banned token; last, the copy's tokens before the chunk's start."""
                token = self.banned[self.row, jnp.minimum(i, spec.banned - 1)] - begin
                low = jnp.where(i < self.bans, token, 0)
                high = jnp.where(i < self.bans, token + 1, wanted - begin)
                place = self.slots()
                return jnp.where(jnp.logical_and(place >= low, place < high), -jnp.inf, x)

            x = lax.fori_loop(0, self.bans + (wanted > begin).astype(jnp.int32), hide, x)
            return update(step, x, carry)

        return lax.fori_loop(0, spec.steps, fold_chunk, init)
