"""Draws of tokens for NVIDIA Hopper in Pallas Mosaic GPU: one thread block a row, one pass over its
logits where no filter asks for more.

A row is cut into chunks that the warpgroups take in turn through rings of TMA copies. The chunks of
a warpgroup lie on top of each other: the tokens at one place of them are a slot. The first pass
keeps of every slot its three largest logits and its mass. To draw, a slot is drawn by its mass (an
exponential race) and then a token among the few of the slot. Filters keep what lies above a
threshold. So a token may stay if the mass above it is small enough; where top_p asks for that, a
few are drawn, looked at together, and the first that may stay is taken. If none may, everything up
to the largest is excluded and the draw is repeated. Every draw is of the softmax over a set that
contains the allowed tokens, so what is accepted is of the softmax over these. Counts and masses
come from the three largest of each slot where these hold every token in question, and from another
pass over the logits where not.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from pallas_kernels.draw.mosaic_block import COLUMNS, Block, Spec, Tuning
from pallas_kernels.draw.rows import BROKEN, SMALLEST_TEMPERATURE, DrawRows

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)
KEPT = 3  # largest logits of a slot
COLUMN_DRAW = -1  # counter of the draw within a slot, downwards: those of slots are not negative


def check(logits_BV: Array, tuning: Tuning | None = None) -> str | None:
    """Why the kernel does not take these logits, or None."""
    V = logits_BV.shape[-1]
    if logits_BV.dtype != jnp.float32:
        return f"mosaic_gpu draw takes float32 logits, got {logits_BV.dtype}"
    least = (tuning or Tuning()).lines * COLUMNS
    if V % COLUMNS or V < least:
        return (
            f"mosaic_gpu draw takes a multiple of {COLUMNS} logits a row, at least {least}, got {V}"
        )
    return None


def draw(
    logits_BV: Array,
    rows: DrawRows,
    *,
    filters: bool = True,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.draw`. float32; a multiple of 128 logits a row, at least 1024. Raises
    ValueError otherwise."""
    del filters  # a row without filters costs no more for its neighbours' sake
    tuning = tuning or Tuning()
    problem = check(logits_BV, tuning)
    if problem:
        raise ValueError(problem)
    B, V = logits_BV.shape
    spec = Spec(B, V, rows.banned_BK.shape[1], tuning, interpret)
    greedy_B = rows.temperature_B < SMALLEST_TEMPERATURE
    rate_B = LOG2E / jnp.where(greedy_B, 1.0, rows.temperature_B)
    # A difference of raw logits: the least that min_p keeps lies this far below the largest.
    reach_B = jnp.log2(rows.min_p_B) / rate_B
    top_k_B = jnp.where((rows.top_k_B <= 0) | (rows.top_k_B >= V), 0, rows.top_k_B)
    # Those to look at
    banned_B = jnp.where(
        rows.banned_BK >= 0, jnp.arange(1, spec.banned + 1, dtype=jnp.int32), 0
    ).max(axis=1)
    key_B2 = lax.bitcast_convert_type(rows.key_B2, jnp.int32)
    ints_B5 = jnp.stack(
        [greedy_B.astype(jnp.int32), top_k_B, banned_B, key_B2[:, 0], key_B2[:, 1]], axis=1
    )
    floats_B3 = jnp.stack([rate_B, reach_B, rows.top_p_B], axis=1)
    lines_BNC = logits_BV.reshape(B, V // COLUMNS, COLUMNS)
    return _launch(spec, lines_BNC, ints_B5, floats_B3, rows.banned_BK)


jitted = functools.partial(jax.jit, static_argnames=("filters", "tuning", "interpret"))(draw)


def _launch(spec: Spec, lines: Array, ints: Array, floats: Array, banned: Array) -> Array:
    W, N, stages = spec.tuning.groups, spec.tuning.lines, spec.tuning.stages

    def draw_token(lines_ref, ints_ref, floats_ref, banned_ref, out_ref, **sm):  # type: ignore[no-untyped-def]
        row = lax.axis_index("row")
        wg = lax.axis_index("wg")
        block = _Row(spec, row, wg, lines_ref, banned_ref, ints_ref[row, 2], floats_ref[row, 0], sm)
        greedy, top_k = ints_ref[row, 0], ints_ref[row, 1]
        key = ints_ref[row, 3], ints_ref[row, 4]
        reach, top_p = floats_ref[row, 1], floats_ref[row, 2]

        first, top, third, total = block.first_pass()
        whole = jnp.logical_and(jnp.logical_and(top > LOWEST, top < jnp.inf), total == total)
        token = jnp.where(whole, first, jnp.int32(BROKEN))
        plain = jnp.logical_and(whole, greedy == 0)

        def drawn() -> Array:
            floor = lax.cond(
                top_k > 0, lambda: block.kth(top_k, top, third), lambda: jnp.float32(-jnp.inf)
            )
            floor = jnp.maximum(floor, top + reach)
            everything = floor <= LOWEST

            count = jnp.where(top_p >= 1, 1, jnp.int32(spec.candidates))

            def one(carry):  # type: ignore[no-untyped-def]
                """The masses above what the last turn drew, which say what may stay; before the
                first turn of all. Then draws.

                In this order there is one `masses` in the program for both: each costs a quarter of
                the time to lower it.
                """
                _, turn, _, wanted, tokens, values = carry
                fresh = turn == 0
                known = jnp.where(fresh, everything, top_p >= 1)
                given = jnp.where(fresh, total, jnp.float32(0))
                masses = lax.cond(
                    known,
                    lambda: (given,) * spec.candidates,
                    lambda: block.masses(floor, values, top, third),
                )
                wanted = jnp.where(
                    fresh, jnp.where(top_p >= 1, jnp.float32(jnp.inf), top_p * masses[0]), wanted
                )
                chosen, good = first, jnp.int32(0)
                for token, value, mass in reversed(list(zip(tokens, values, masses, strict=True))):
                    # The largest logit is always allowed, whatever rounding says.
                    stays = jnp.logical_and(turn > 0, jnp.logical_or(mass < wanted, value >= top))
                    chosen, good = (
                        jnp.where(stays, token, chosen),
                        jnp.where(stays, jnp.int32(1), good),
                    )
                pivot = functools.reduce(jnp.maximum, values)
                more = lambda: block.draw_each(count, key, turn, floor, pivot, first, top)
                tokens, values = lax.cond(good > 0, lambda: (tokens, values), more)
                return good, turn + 1, chosen, wanted, tokens, values

            none = (first,) * spec.candidates, (jnp.float32(-jnp.inf),) * spec.candidates
            begin = jnp.int32(0), jnp.int32(0), first, jnp.float32(0), *none
            return lax.while_loop(lambda carry: carry[0] == 0, one, begin)[2]

        token = lax.cond(plain, drawn, lambda: token)

        @pl.when(wg == 0)
        def _() -> None:
            out_ref[row] = token

    scratch = {
        "ring": plgpu.SMEM((W, stages, N, COLUMNS), jnp.float32),
        "kept": plgpu.SMEM((KEPT, W * N, COLUMNS), jnp.float32),
        "mass": plgpu.SMEM((W * N, COLUMNS), jnp.float32),
        "score": plgpu.SMEM((spec.candidates, W * N, COLUMNS), jnp.float32),
        "told_f": plgpu.SMEM((4,), jnp.float32),
        "told_i": plgpu.SMEM((4,), jnp.int32),
        "values": plgpu.SMEM((spec.candidates,), jnp.float32),
        "tokens": plgpu.SMEM((spec.candidates,), jnp.int32),
        "full": plgpu.Barrier(num_barriers=W * stages),
        "met": plgpu.Barrier(num_arrivals=W),
    }
    options: dict[str, Any] = {"compiler_params": plgpu.CompilerParams(approx_math=True)}
    if spec.interpret is not None:
        options["interpret"] = spec.interpret
    run = plgpu.kernel(
        draw_token,
        out_type=jax.ShapeDtypeStruct((spec.B,), jnp.int32),
        scratch_types=scratch,
        grid=(spec.B,),
        grid_names=("row",),
        num_threads=W,
        thread_name="wg",
        **options,
    )
    return run(lines, ints, floats, banned)


class _Row(Block):
    """The steps of a draw; every method is called by all warpgroups together and gives all of them
    the same scalars."""

    def first_pass(self) -> tuple[Array, Array, Array, Array]:
        """The first token of the largest logit, that logit, the largest logit that is third in its
        slot, and the mass of all tokens.

        Each slot's largest logits and mass stay in shared memory.
        """
        rate = self.rate

        def use(step, x, carry):  # type: ignore[no-untyped-def]
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
            (low, low, low, self.full(0.0), self.full(0, jnp.int32)), use
        )
        for i, m in enumerate((m1, m2, m3)):
            self.mine("kept", i)[...] = m
        top, third = self.told(
            lambda: tuple(jnp.max(self.all_of("kept", i)) for i in (0, KEPT - 1)),
            jnp.float32,
            jnp.float32,
        )
        mass = mass * jnp.exp2((m1 - top) * rate)
        wanted = (where * self.spec.tuning.groups + self.wg) * self.spec.size
        token = jnp.minimum(wanted, self.spec.V - self.spec.size) + self.place()
        # Negative, so that the largest is the first token.
        self.mine("score", 0)[...] = float_bits(
            jnp.where(m1 == top, -token, jnp.int32(-(2**31) + 1))
        )
        self.mine("mass")[...] = mass
        first, total = self.told(
            lambda: (-jnp.max(int_bits(self.all_of("score", 0))), jnp.sum(self.all_of("mass"))),
            jnp.int32,
            jnp.float32,
        )
        return first, top, third, total

    def masses(
        self, floor: Array, pivots: tuple[Array, ...], top: Array, third: Array
    ) -> tuple[Array, ...]:
        """The masses of the logits of at least `floor` and above each pivot; each slot's above the
        largest pivot in shared memory."""

        def add(x: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            weight = jnp.where(x >= floor, jnp.exp2((x - top) * self.rate), 0.0)
            return tuple(
                mass + jnp.where(x > pivot, weight, 0.0)
                for mass, pivot in zip(carry, pivots, strict=True)
            )

        zeros = (self.full(0.0),) * len(pivots)

        def kept() -> tuple[Array, ...]:
            return functools.reduce(
                lambda carry, i: add(self.mine("kept", i)[...], carry), range(KEPT), zeros
            )

        def streamed() -> tuple[Array, ...]:
            return self.stream(zeros, lambda _, x, carry: add(x, carry))  # type: ignore[no-any-return]

        # Above the largest pivot is the least.
        masses = lax.cond(
            third < jnp.maximum(floor, functools.reduce(jnp.minimum, pivots)), kept, streamed
        )
        self.mine("mass")[...] = functools.reduce(jnp.minimum, masses)
        for i, mass in enumerate(masses):
            self.mine("score", i)[...] = mass
        sums = lambda: tuple(jnp.sum(self.all_of("score", i)) for i in range(len(pivots)))
        return self.told(sums, *[jnp.float32] * len(pivots))

    def kth(self, k: Array, top: Array, third: Array) -> Array:
        """A threshold that exactly the k largest logits and those equal to the k-th reach."""
        spec = self.spec

        def threshold(t: Array, groups: int = 1) -> Array:
            return float_of(self.full(t, jnp.int32, groups))

        def image(x: Array) -> Array:
            # By way of an array: scalars have no bit casts.
            return jnp.max(ordered(self.full(x)))

        def value(t: Array) -> Array:
            return jnp.max(threshold(t))

        def among_kept() -> tuple[Array, ...]:
            def counts(s: Array, t: Array) -> tuple[Array, Array]:
                bounds = threshold(s, spec.tuning.groups), threshold(t, spec.tuning.groups)
                kept = [reach(self.all_of("kept", i), *bounds) for i in range(KEPT)]
                return counts_of(jnp.sum(functools.reduce(jnp.add, kept)))

            # Each slot has one logit of at least the smallest of the slots' largest.
            least = -jnp.max(-ordered(self.all_of("kept", 0)))
            low = jnp.where(k <= spec.tuning.groups * spec.size, least, image(jnp.float32(LOWEST)))
            low = search(k, low, image(top), counts)
            return low, image(third), value(low)

        def exact() -> Array:
            def sums() -> tuple[Array, ...]:
                return tuple(
                    jnp.sum(counts) for counts in counts_of(int_bits(self.all_of("score", 0)))
                )

            def counts(s: Array, t: Array) -> tuple[Array, Array]:
                bounds = threshold(s), threshold(t)
                found = self.stream(
                    self.full(0, jnp.int32), lambda _, x, carry: carry + reach(x, *bounds)
                )
                self.mine("score", 0)[...] = float_bits(found)
                return self.told(sums, jnp.int32, jnp.int32)  # type: ignore[return-value]

            # Most often all that counts is kept, and it only takes a pass to know.
            found = search(k, low, high, counts, low_first=True)
            return self.told(lambda: (value(found),), jnp.float32)[0]

        # Every logit above `third` is kept. Where the k-th that is kept is not above it, neither is
        # the k-th of all.
        low, high, floor = self.told(among_kept, jnp.int32, jnp.int32, jnp.float32)
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
        """`count` candidates, each drawn by its slot's mass and within the slot, as tokens and
        their logits; the last one repeats."""
        spec, sm = self.spec, self.sm
        self.draw_slots(count, key, turn)
        mine = jnp.minimum(self.wg, count - 1)
        token, value = self.draw_in(
            sm["told_i"].at[mine][...], key, (mine, turn), floor, pivot, first, top
        )

        @pl.when(self.wg < spec.candidates)
        def _() -> None:
            sm["tokens"].at[self.wg][...] = token
            sm["values"].at[self.wg][...] = value

        self.meet()
        return tuple(sm["tokens"].at[i][...] for i in range(spec.candidates)), tuple(
            sm["values"].at[i][...] for i in range(spec.candidates)
        )

    def draw_slots(self, count: Array, key: tuple[Array, Array], turn: Array) -> None:
        """`count` slots by their masses in shared memory, told to all: for each the one with the
        largest mass / exponential variable."""
        spec, sm = self.spec, self.sm
        slot = self.held(self.place() + self.wg * spec.size)
        mass = self.mine("mass")[...]

        @pl.loop(0, lax.div(count + 1, jnp.int32(2)))  # two numbers of each call
        def _(i):  # type: ignore[no-untyped-def]
            for j, bits in enumerate(threefry(key, slot, 2 * turn + i)):

                @pl.when(2 * i + j < spec.candidates)
                def _(at=2 * i + j, bits=bits) -> None:  # type: ignore[no-untyped-def]
                    self.mine("score", at)[...] = mass / exponential(bits)

        self.meet()

        @pl.when(self.wg == 0)
        def _() -> None:
            @pl.loop(0, count)
            def _(j):  # type: ignore[no-untyped-def]
                scores = self.all_of("score", j)
                sm["told_i"].at[j][...] = jnp.max(
                    jnp.where(scores == jnp.max(scores), self.place(spec.tuning.groups), -1)
                )

        self.meet()

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
        """A token of the slot, and its logit, by the weights of those of at least `floor` and above
        `pivot`. `counter` is the candidate's number and the turn."""
        spec, size = self.spec, jnp.int32(self.spec.size)
        owner, place = lax.div(slot, size), lax.rem(slot, size)
        line, column = lax.div(slot, jnp.int32(COLUMNS)), lax.rem(slot, jnp.int32(COLUMNS))
        tokens = [slot + step * spec.tuning.groups * spec.size for step in range(spec.steps - 1)]
        values = [
            self.lines[self.row, line + step * spec.tuning.groups * spec.tuning.lines, column]
            for step in range(spec.steps - 1)
        ]
        wanted, begin = self.begin(jnp.int32(spec.steps - 1), owner)
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
        sums, total = [], jnp.float32(0)
        for value in values:
            seen = jnp.logical_and(value >= floor, value > pivot)
            total = total + jnp.where(seen, jnp.exp2((value - top) * self.rate), 0.0)
            sums.append(total)
        bits, _ = threefry(key, COLUMN_DRAW - counter[0], counter[1])
        goal = uniform(bits) * total
        token, found = first, top
        # From the last to the first: the one that stays is the first whose sum is above the goal,
        # so it has added to it.
        for i in reversed(range(len(values))):
            here = sums[i] > goal
            token, found = jnp.where(here, tokens[i], token), jnp.where(here, values[i], found)
        return token, found
