"""The steps of one row's draw: its first pass, masses, the k-th largest logit, and candidates.

Every method is called by all warpgroups together and gives all of them the same scalars.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.draw.bits import (
    counts_of,
    exponential,
    float_bits,
    float_of,
    int_bits,
    ordered,
    reach,
    search,
    threefry,
    uniform,
)
from pallas_kernels.draw.mosaic_block import COLUMNS, KEPT, Block

LOWEST = float(jnp.finfo(jnp.float32).min)
COLUMN_DRAW = -1  # counter of the draw within a slot, downwards: those of slots are not negative


class Row(Block):
    """The steps of a draw; every method is called by all warpgroups together and gives all of them
    the same scalars."""

    def first_pass(self) -> tuple[Array, Array, Array, Array]:
        """The first token with the largest logit, that logit, the largest logit that is third in
        its slot, and the mass of all tokens.

        Leaves each slot's `KEPT` largest logits and its mass in shared memory.
        """
        rate = self.rate

        def update(step, x, carry):  # type: ignore[no-untyped-def]
            m1, m2, m3, mass, where = carry
            d = x - m1
            more = d > 0
            e = jnp.exp2(-jnp.abs(d) * rate)
            mass = jnp.where(more, mass * e + 1.0, mass + e)
            where = jnp.where(more, step, where)
            rest = jnp.minimum(m1, x)
            m1 = jnp.maximum(m1, x)
            m3 = jnp.maximum(m3, jnp.minimum(m2, rest))
            m2 = jnp.maximum(m2, rest)
            return m1, m2, m3, mass, where

        low = self.full(LOWEST)
        m1, m2, m3, mass, where = self.stream(
            (low, low, low, self.full(0.0), self.full(0, jnp.int32)), update
        )
        for i, m in enumerate((m1, m2, m3)):
            self.own("kept", i)[...] = m
        top, third = self.broadcast(
            lambda: tuple(jnp.max(self.all_slots("kept", i)) for i in (0, KEPT - 1)),
            jnp.float32,
            jnp.float32,
        )
        mass = mass * jnp.exp2((m1 - top) * rate)
        wanted = (where * self.spec.tuning.groups + self.wg) * self.spec.size
        token = jnp.minimum(wanted, self.spec.V - self.spec.size) + self.slots()
        # Negative, so that the largest is the first token.
        self.own("score", 0)[...] = float_bits(
            jnp.where(m1 == top, -token, jnp.int32(-(2**31) + 1))
        )
        self.own("mass")[...] = mass
        first, total = self.broadcast(
            lambda: (
                -jnp.max(int_bits(self.all_slots("score", 0))),
                jnp.sum(self.all_slots("mass")),
            ),
            jnp.int32,
            jnp.float32,
        )
        return first, top, third, total

    def masses(
        self, floor: Array, pivots: tuple[Array, ...], top: Array, third: Array
    ) -> tuple[Array, ...]:
        """For each pivot, the mass of the logits ≥ `floor` and > pivot. Leaves each slot's mass
        above the largest pivot in shared memory."""

        def add(x: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            weight = jnp.where(x >= floor, jnp.exp2((x - top) * self.rate), 0.0)
            return tuple(
                mass + jnp.where(x > pivot, weight, 0.0)
                for mass, pivot in zip(carry, pivots, strict=True)
            )

        zeros = (self.full(0.0),) * len(pivots)

        def kept() -> tuple[Array, ...]:
            return functools.reduce(
                lambda carry, i: add(self.own("kept", i)[...], carry), range(KEPT), zeros
            )

        def streamed() -> tuple[Array, ...]:
            return self.stream(zeros, lambda _, x, carry: add(x, carry))  # type: ignore[no-any-return]

        # Above the largest pivot is the least.
        masses = lax.cond(
            third < jnp.maximum(floor, functools.reduce(jnp.minimum, pivots)), kept, streamed
        )
        self.own("mass")[...] = functools.reduce(jnp.minimum, masses)
        for i, mass in enumerate(masses):
            self.own("score", i)[...] = mass
        sums = lambda: tuple(jnp.sum(self.all_slots("score", i)) for i in range(len(pivots)))
        return self.broadcast(sums, *[jnp.float32] * len(pivots))

    def kth(self, k: Array, top: Array, third: Array) -> Array:
        """A threshold that only the k largest logits and those equal to the k-th reach."""
        spec = self.spec

        def threshold(t: Array, groups: int = 1) -> Array:
            return float_of(self.full(t, jnp.int32, groups))

        def image(x: Array) -> Array:
            # Through an array: Mosaic has no bit casts of scalars.
            return jnp.max(ordered(self.full(x)))

        def value(t: Array) -> Array:
            return jnp.max(threshold(t))

        def among_kept() -> tuple[Array, ...]:
            def counts(s: Array, t: Array) -> tuple[Array, Array]:
                bounds = threshold(s, spec.tuning.groups), threshold(t, spec.tuning.groups)
                kept = [reach(self.all_slots("kept", i), *bounds) for i in range(KEPT)]
                return counts_of(jnp.sum(functools.reduce(jnp.add, kept)))

            # Every slot has a logit that reaches the smallest of the slots' largest logits.
            least = -jnp.max(-ordered(self.all_slots("kept", 0)))
            low = jnp.where(k <= spec.tuning.groups * spec.size, least, image(jnp.float32(LOWEST)))
            low = search(k, low, image(top), counts)
            return low, image(third), value(low)

        def exact() -> Array:
            def sums() -> tuple[Array, ...]:
                return tuple(
                    jnp.sum(counts) for counts in counts_of(int_bits(self.all_slots("score", 0)))
                )

            def counts(s: Array, t: Array) -> tuple[Array, Array]:
                bounds = threshold(s), threshold(t)
                tally = self.stream(
                    self.full(0, jnp.int32), lambda _, x, carry: carry + reach(x, *bounds)
                )
                self.own("score", 0)[...] = float_bits(tally)
                return self.broadcast(sums, jnp.int32, jnp.int32)  # type: ignore[return-value]

            # The kept logits usually decide already, and one pass confirms that.
            kth_image = search(k, low, high, counts, low_first=True)
            return self.broadcast(lambda: (value(kth_image),), jnp.float32)[0]

        # All logits above `third` are kept. If the k-th largest kept logit is not above it, more
        # logits than the kept ones may count.
        low, high, floor = self.broadcast(among_kept, jnp.int32, jnp.int32, jnp.float32)
        return lax.cond(third < floor, lambda: floor, exact)

    def draw_each(
        self,
        count: Array,
        key: tuple[Array, Array],
        turn: Array,
        floor: Array,
        pivot: Array,
        first: Array,
        top: Array,
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Tokens and logits of `count` candidates: each a slot drawn by mass, then a token of the
        slot. Warpgroups beyond `count` repeat the last candidate."""
        spec = self.spec
        sm = self.sm
        self.draw_slots(count, key, turn)
        candidate = jnp.minimum(self.wg, count - 1)
        token, value = self.draw_in(
            sm["ints"].at[candidate][...], key, (candidate, turn), floor, pivot, first, top
        )

        @pl.when(self.wg < spec.candidates)
        def _() -> None:
            sm["tokens"].at[self.wg][...] = token
            sm["values"].at[self.wg][...] = value

        self.sync()
        return tuple(sm["tokens"].at[i][...] for i in range(spec.candidates)), tuple(
            sm["values"].at[i][...] for i in range(spec.candidates)
        )

    def draw_slots(self, count: Array, key: tuple[Array, Array], turn: Array) -> None:
        """Draw `count` slots by their masses in shared memory and broadcast their numbers. The slot
        with the largest mass / exponential variable wins (an exponential race)."""
        spec = self.spec
        sm = self.sm
        slot = self.laid_out(self.slots() + self.wg * spec.size)
        mass = self.own("mass")[...]

        @pl.loop(0, lax.div(count + 1, jnp.int32(2)))  # two numbers of each call
        def _(i):  # type: ignore[no-untyped-def]
            for j, bits in enumerate(threefry(key, slot, 2 * turn + i)):

                @pl.when(2 * i + j < spec.candidates)
                def _(candidate=2 * i + j, bits=bits) -> None:  # type: ignore[no-untyped-def]
                    self.own("score", candidate)[...] = mass / exponential(bits)

        self.sync()

        @pl.when(self.wg == 0)
        def _() -> None:
            @pl.loop(0, count)
            def _(j):  # type: ignore[no-untyped-def]
                scores = self.all_slots("score", j)
                sm["ints"].at[j][...] = jnp.max(
                    jnp.where(scores == jnp.max(scores), self.slots(spec.tuning.groups), -1)
                )

        self.sync()

    def draw_in(
        self,
        slot: Array,
        key: tuple[Array, Array],
        counter: tuple[Array, Array],
        floor: Array,
        pivot: Array,
        first: Array,
        top: Array,
    ) -> tuple[Array, Array]:
        """A token of the slot and its logit, drawn by weight among logits ≥ `floor` and > `pivot`.
        `counter` is the candidate's number and the turn."""
        spec = self.spec
        size = jnp.int32(self.spec.size)
        owner = lax.div(slot, size)
        place = lax.rem(slot, size)
        line = lax.div(slot, jnp.int32(COLUMNS))
        column = lax.rem(slot, jnp.int32(COLUMNS))
        tokens = [slot + step * spec.tuning.groups * spec.size for step in range(spec.steps - 1)]
        values = [
            self.lines[self.row, line + step * spec.tuning.groups * spec.tuning.lines, column]
            for step in range(spec.steps - 1)
        ]
        wanted, begin = self.chunk_start(jnp.int32(spec.steps - 1), owner)
        tokens.append(begin + place)
        value = self.lines[self.row, lax.div(tokens[-1], jnp.int32(COLUMNS)), column]
        values.append(jnp.where(tokens[-1] >= wanted, value, -jnp.inf))

        def ban(i, values):  # type: ignore[no-untyped-def]
            banned = self.banned[self.row, i]
            return tuple(
                jnp.where(token == banned, -jnp.inf, value)
                for token, value in zip(tokens, values, strict=True)
            )

        values = list(lax.fori_loop(0, self.bans, ban, tuple(values)))
        sums = []
        total = jnp.float32(0)
        for value in values:
            seen = jnp.logical_and(value >= floor, value > pivot)
            total = total + jnp.where(seen, jnp.exp2((value - top) * self.rate), 0.0)
            sums.append(total)
        bits, _ = threefry(key, COLUMN_DRAW - counter[0], counter[1])
        goal = uniform(bits) * total
        token = first
        logit = top
        # Backwards, so that the first token whose running sum exceeds the goal remains. Its own
        # weight took the sum over the goal.
        for i in reversed(range(len(values))):
            here = sums[i] > goal
            token = jnp.where(here, tokens[i], token)
            logit = jnp.where(here, values[i], logit)
        return token, logit
