"""One row's thread block: what its warpgroups tell each other, and how they go through the row's
logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = 128
# At most, drawn at once where top_p decides: at 0.9 none of them may stay once in a thousand times
CANDIDATES = 3


class Tuning(NamedTuple):
    """Sizes that change speed and, as slots change, which token a key draws."""

    groups: int = 4  # warpgroups
    lines: int = 8  # of 128 logits in a chunk
    stages: int = 6


class Spec(NamedTuple):
    B: int
    V: int
    banned: int
    tuning: Tuning
    interpret: Any

    @property
    def size(self) -> int:
        """Logits of a chunk."""
        return self.tuning.lines * COLUMNS

    @property
    def candidates(self) -> int:
        """Each is drawn within its slot by a warpgroup."""
        return min(CANDIDATES, self.tuning.groups)

    @property
    def steps(self) -> int:
        """Chunks of one warpgroup; what the last ones have beyond the row is masked."""
        return -(-self.V // (self.size * self.tuning.groups))


class Block:
    """One row's thread block; every method is called by all its warpgroups together and gives all
    of them the same scalars."""

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
        self.spec, self.row, self.wg, self.lines, self.banned, self.bans, self.rate, self.sm = (
            spec,
            row,
            wg,
            lines,
            banned,
            bans,
            rate,
            sm,
        )
        self.shape = (spec.tuning.lines, COLUMNS)

    def meet(self) -> None:
        """All warpgroups have come here; what they wrote to shared memory before is seen after."""
        plgpu.barrier_arrive(self.sm["met"])
        plgpu.barrier_wait(self.sm["met"])

    def told(self, work: Callable[[], tuple[Array, ...]], *types: Any) -> tuple[Array, ...]:
        """Scalars of these types that the first warpgroup works out of what all have stored, told
        to all.

        Only one may: a reduction to a scalar goes through scratch memory that Mosaic shares among
        the warpgroups.
        """
        boxes = [
            self.sm["told_f" if t == jnp.float32 else "told_i"].at[i] for i, t in enumerate(types)
        ]
        self.meet()

        @pl.when(self.wg == 0)
        def _() -> None:
            for box, x in zip(boxes, work(), strict=True):
                box[...] = x

        self.meet()
        return tuple(box[...] for box in boxes)

    def mine(self, name: str, *at: Any) -> Any:
        """Where this warpgroup stores its slots' share."""
        lines = self.spec.tuning.lines
        return self.sm[name].at[*at, pl.ds(self.wg * lines, lines)]

    def all_of(self, name: str, *at: Any) -> Array:
        """What all warpgroups have stored there. One array, not one of each: operations are what it
        takes time to lower."""
        return self.held(self.sm[name].at[*at][...] if at else self.sm[name][...])

    def place(self, groups: int = 1) -> Array:
        """The number of each slot within a warpgroup, or among all `groups`."""
        line, column = (
            lax.broadcasted_iota(jnp.int32, (groups * self.shape[0], COLUMNS), i) for i in (0, 1)
        )
        return line * COLUMNS + column

    def held(self, x: Array) -> Array:
        """x, four numbers in a row to a thread. All that it is used with is inferred to be so too,
        and every layout that is named costs inference a guess: so one array of a computation is."""
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=4))

    def full(self, value: float, dtype: Any = jnp.float32, groups: int = 1) -> Array:
        return self.held(jnp.full((groups * self.shape[0], COLUMNS), value, dtype))

    def begin(self, step: Array, wg: Array) -> tuple[Array, Array]:
        """The first token of a chunk, and of its copy: the row's last lines where the chunk reaches
        beyond them."""
        wanted = (step * self.spec.tuning.groups + wg) * self.spec.size
        return wanted, jnp.minimum(wanted, self.spec.V - self.spec.size)

    def stream(self, init: Any, use: Callable[[Array, Array, Any], Any]) -> Any:
        """Folds `use(step, x, carry)` over this warpgroup's chunks; x is -inf where banned or
        beyond the row."""
        spec, stages = self.spec, self.spec.tuning.stages

        def copy(step) -> None:  # type: ignore[no-untyped-def]
            at = lax.rem(step, jnp.int32(stages))
            _, begin = self.begin(step, self.wg)
            source = self.lines.at[
                self.row, pl.ds(lax.div(begin, jnp.int32(COLUMNS)), spec.tuning.lines)
            ]
            plgpu.copy_gmem_to_smem(
                source, self.sm["ring"].at[self.wg, at], self.sm["full"].at[self.wg * stages + at]
            )

        plgpu.commit_smem()  # the last pass has read what the first copies overwrite
        pl.loop(0, min(stages, spec.steps))(copy)

        def take(step, carry):  # type: ignore[no-untyped-def]
            at = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(self.sm["full"].at[self.wg * stages + at])
            x = self.sm["ring"].at[self.wg, at][...]
            plgpu.commit_smem()
            pl.when(step + stages < spec.steps)(lambda: copy(step + stages))
            wanted, begin = self.begin(step, self.wg)

            def hide(i, x):  # type: ignore[no-untyped-def]
                """Bans, and then what the copy of a last chunk has of the chunk before."""
                token = self.banned[self.row, jnp.minimum(i, spec.banned - 1)] - begin
                low, high = (
                    jnp.where(i < self.bans, token, 0),
                    jnp.where(i < self.bans, token + 1, wanted - begin),
                )
                place = self.place()
                return jnp.where(jnp.logical_and(place >= low, place < high), -jnp.inf, x)

            x = lax.fori_loop(0, self.bans + (wanted > begin).astype(jnp.int32), hide, x)
            return use(step, x, carry)

        return lax.fori_loop(0, spec.steps, take, init)
