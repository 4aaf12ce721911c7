"""Draws of tokens for NVIDIA Hopper in Pallas Mosaic GPU: one thread block a row, one pass over its logits where no filter asks for more.

A row is cut into chunks that the warpgroups take in turn through rings of TMA copies. The chunks of a warpgroup lie on top of each other:
the tokens at one place of them are a slot. The first pass keeps of every slot its three largest logits and its mass. To draw, a slot is
drawn by its mass (an exponential race) and then a token among the few of the slot. Filters keep what lies above a threshold. So a token may
stay if the mass above it is small enough; otherwise everything up to it is excluded and the draw is repeated. Every draw is of the softmax
over a set that contains the allowed tokens, so what is accepted is of the softmax over these. Counts and masses come from the three largest
of each slot where these hold every token in question, and from another pass over the logits where not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.draw.bits import counts_of, exponential, float_of, ordered, reach, search, threefry, uniform
from pallas_kernels.draw.rows import BROKEN, SMALLEST_TEMPERATURE, DrawRows

LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)
COLUMNS = 128
KEPT = 3  # largest logits of a slot
COLUMN_DRAW = -1  # counter of the draw within a slot


class Tuning(NamedTuple):
    """Sizes that change speed and, as slots change, which token a key draws."""

    groups: int = 4  # warpgroups
    lines: int = 8  # of 128 logits in a chunk
    stages: int = 6


class _Spec(NamedTuple):
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
    def steps(self) -> int:
        """Chunks of one warpgroup; what the last ones have beyond the row is masked."""
        return -(-self.V // (self.size * self.tuning.groups))


def check(logits_BV: Array, tuning: Tuning | None = None) -> str | None:
    """Why the kernel does not take these logits, or None."""
    V = logits_BV.shape[-1]
    if logits_BV.dtype != jnp.float32:
        return f"mosaic_gpu draw takes float32 logits, got {logits_BV.dtype}"
    least = (tuning or Tuning()).lines * COLUMNS
    if V % COLUMNS or V < least:
        return f"mosaic_gpu draw takes a multiple of {COLUMNS} logits a row, at least {least}, got {V}"
    return None


def draw(logits_BV: Array, rows: DrawRows, *, filters: bool = True, tuning: Tuning | None = None, interpret: Any = None) -> Array:
    """See `pallas_kernels.draw`. float32; a multiple of 128 logits a row, at least 1024. Raises ValueError otherwise."""
    del filters  # a row without filters costs no more for its neighbours' sake
    tuning = tuning or Tuning()
    problem = check(logits_BV, tuning)
    if problem:
        raise ValueError(problem)
    B, V = logits_BV.shape
    spec = _Spec(B, V, rows.banned_BK.shape[1], tuning, interpret)
    greedy_B = rows.temperature_B < SMALLEST_TEMPERATURE
    rate_B = LOG2E / jnp.where(greedy_B, 1.0, rows.temperature_B)
    # A difference of raw logits: the least that min_p keeps lies this far below the largest.
    reach_B = jnp.log2(rows.min_p_B) / rate_B
    top_k_B = jnp.where((rows.top_k_B <= 0) | (rows.top_k_B >= V), 0, rows.top_k_B)
    banned_B = jnp.where(rows.banned_BK >= 0, jnp.arange(1, spec.banned + 1, dtype=jnp.int32), 0).max(axis=1)  # those to look at
    key_B2 = lax.bitcast_convert_type(rows.key_B2, jnp.int32)
    ints_B5 = jnp.stack([greedy_B.astype(jnp.int32), top_k_B, banned_B, key_B2[:, 0], key_B2[:, 1]], axis=1)
    floats_B3 = jnp.stack([rate_B, reach_B, rows.top_p_B], axis=1)
    lines_BNC = logits_BV.reshape(B, V // COLUMNS, COLUMNS)
    return _launch(spec, lines_BNC, ints_B5, floats_B3, rows.banned_BK)


jitted = functools.partial(jax.jit, static_argnames=("filters", "tuning", "interpret"))(draw)


def _launch(spec: _Spec, lines: Array, ints: Array, floats: Array, banned: Array) -> Array:
    W, N, stages = spec.tuning.groups, spec.tuning.lines, spec.tuning.stages

    def draw_token(lines_ref, ints_ref, floats_ref, banned_ref, out_ref, **sm):  # type: ignore[no-untyped-def]
        row = lax.axis_index("row")
        wg = lax.axis_index("wg")
        block = _Block(spec, row, wg, lines_ref, banned_ref, ints_ref[row, 2], floats_ref[row, 0], sm)
        greedy, top_k = ints_ref[row, 0], ints_ref[row, 1]
        key = ints_ref[row, 3], ints_ref[row, 4]
        reach, top_p = floats_ref[row, 1], floats_ref[row, 2]

        first, top, third, total = block.first_pass()
        whole = jnp.logical_and(jnp.logical_and(top > LOWEST, top < jnp.inf), total == total)
        token = jnp.where(whole, first, jnp.int32(BROKEN))
        plain = jnp.logical_and(whole, greedy == 0)

        def drawn() -> Array:
            floor = lax.cond(top_k > 0, lambda: block.kth(top_k, top, third), lambda: jnp.float32(-jnp.inf))
            floor = jnp.maximum(floor, top + reach)
            everything = floor <= LOWEST

            def one(carry):  # type: ignore[no-untyped-def]
                """The mass above what the last turn drew, which says whether that may stay; before the first turn of all. Then a draw.

                In this order there is one `masses` in the program for both: each costs a quarter of the time to lower it.
                """
                _, turn, pivot, chosen, wanted = carry
                fresh = turn == 0
                known = jnp.where(fresh, everything, top_p >= 1)
                mass = lax.cond(known, lambda: jnp.where(fresh, total, jnp.float32(0)), lambda: block.masses(floor, pivot, top, third))
                wanted = jnp.where(fresh, jnp.where(top_p >= 1, jnp.float32(jnp.inf), top_p * mass), wanted)
                # The largest logit is always allowed, whatever rounding says.
                good = jnp.logical_and(turn > 0, jnp.logical_or(mass < wanted, pivot >= top))

                def next_one() -> tuple[Array, Array]:
                    slot = block.draw_slot(key, turn)
                    return block.draw_in(slot, key, turn, floor, pivot, first, top)

                chosen, pivot = lax.cond(good, lambda: (chosen, pivot), next_one)
                return good.astype(jnp.int32), turn + 1, pivot, chosen, wanted

            begin = jnp.int32(0), jnp.int32(0), jnp.float32(-jnp.inf), first, jnp.float32(0)
            return lax.while_loop(lambda carry: carry[0] == 0, one, begin)[3]

        token = lax.cond(plain, drawn, lambda: token)

        @pl.when(wg == 0)
        def _() -> None:
            out_ref[row] = token

    scratch = {
        "ring": plgpu.SMEM((W, stages, N, COLUMNS), jnp.float32),
        "kept": plgpu.SMEM((KEPT, W * N, COLUMNS), jnp.float32),
        "mass": plgpu.SMEM((W * N, COLUMNS), jnp.float32),
        "score": plgpu.SMEM((W * N, COLUMNS), jnp.float32),
        "work": plgpu.SMEM((W * N, COLUMNS), jnp.int32),
        "told_f": plgpu.SMEM((4,), jnp.float32),
        "told_i": plgpu.SMEM((4,), jnp.int32),
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


class _Block:
    """One row's thread block; every method is called by all its warpgroups together and gives all of them the same scalars."""

    def __init__(self, spec: _Spec, row: Array, wg: Array, lines: Any, banned: Any, bans: Array, rate: Array, sm: dict[str, Any]):
        self.spec, self.row, self.wg, self.lines, self.banned, self.bans, self.rate, self.sm = spec, row, wg, lines, banned, bans, rate, sm
        self.shape = (spec.tuning.lines, COLUMNS)

    def meet(self) -> None:
        """All warpgroups have come here; what they wrote to shared memory before is seen after."""
        plgpu.barrier_arrive(self.sm["met"])
        plgpu.barrier_wait(self.sm["met"])

    def told(self, work: Callable[[], tuple[Array, ...]], *types: Any) -> tuple[Array, ...]:
        """Scalars of these types that the first warpgroup works out of what all have stored, told to all.

        Only one may: a reduction to a scalar goes through scratch memory that Mosaic shares among the warpgroups.
        """
        boxes = [self.sm["told_f" if t == jnp.float32 else "told_i"].at[i] for i, t in enumerate(types)]
        self.meet()

        @pl.when(self.wg == 0)
        def _() -> None:
            for box, x in zip(boxes, work(), strict=True):
                box[...] = x

        self.meet()
        return tuple(box[...] for box in boxes)

    def mine(self, name: str, *at: int) -> Any:
        """Where this warpgroup stores its slots' share."""
        lines = self.spec.tuning.lines
        return self.sm[name].at[*at, pl.ds(self.wg * lines, lines)]

    def all_of(self, name: str, *at: int) -> Array:
        """What all warpgroups have stored there. One array, not one of each: operations are what it takes time to lower."""
        return self.held(self.sm[name].at[*at][...] if at else self.sm[name][...])

    def place(self, groups: int = 1) -> Array:
        """The number of each slot within a warpgroup, or among all `groups`."""
        line, column = (lax.broadcasted_iota(jnp.int32, (groups * self.shape[0], COLUMNS), i) for i in (0, 1))
        return line * COLUMNS + column

    def held(self, x: Array) -> Array:
        """x, four numbers in a row to a thread. All that it is used with is inferred to be so too, and every layout that is named costs
        inference a guess: so one array of a computation is."""
        return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=4))

    def full(self, value: float, dtype: Any = jnp.float32, groups: int = 1) -> Array:
        return self.held(jnp.full((groups * self.shape[0], COLUMNS), value, dtype))

    def begin(self, step: Array, wg: Array) -> tuple[Array, Array]:
        """The first token of a chunk, and of its copy: the row's last lines where the chunk reaches beyond them."""
        wanted = (step * self.spec.tuning.groups + wg) * self.spec.size
        return wanted, jnp.minimum(wanted, self.spec.V - self.spec.size)

    def stream(self, init: Any, use: Callable[[Array, Array, Any], Any]) -> Any:
        """Folds `use(step, x, carry)` over this warpgroup's chunks; x is -inf where banned or beyond the row."""
        spec, stages = self.spec, self.spec.tuning.stages

        def copy(step) -> None:  # type: ignore[no-untyped-def]
            at = lax.rem(step, jnp.int32(stages))
            _, begin = self.begin(step, self.wg)
            source = self.lines.at[self.row, pl.ds(lax.div(begin, jnp.int32(COLUMNS)), spec.tuning.lines)]
            plgpu.copy_gmem_to_smem(source, self.sm["ring"].at[self.wg, at], self.sm["full"].at[self.wg * stages + at])

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
                low, high = jnp.where(i < self.bans, token, 0), jnp.where(i < self.bans, token + 1, wanted - begin)
                place = self.place()
                return jnp.where(jnp.logical_and(place >= low, place < high), -jnp.inf, x)

            x = lax.fori_loop(0, self.bans + (wanted > begin).astype(jnp.int32), hide, x)
            return use(step, x, carry)

        return lax.fori_loop(0, spec.steps, take, init)

    def first_pass(self) -> tuple[Array, Array, Array, Array]:
        """The first token of the largest logit, that logit, the largest logit that is third in its slot, and the mass of all tokens.

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
        m1, m2, m3, mass, where = self.stream((low, low, low, self.full(0.0), self.full(0, jnp.int32)), use)
        for i, m in enumerate((m1, m2, m3)):
            self.mine("kept", i)[...] = m
        top, third = self.told(lambda: tuple(jnp.max(self.all_of("kept", i)) for i in (0, KEPT - 1)), jnp.float32, jnp.float32)
        mass = mass * jnp.exp2((m1 - top) * rate)
        wanted = (where * self.spec.tuning.groups + self.wg) * self.spec.size
        token = jnp.minimum(wanted, self.spec.V - self.spec.size) + self.place()
        # Negative, so that the largest is the first token.
        self.mine("work")[...] = jnp.where(m1 == top, -token, jnp.int32(-(2**31) + 1))
        self.mine("mass")[...] = mass
        first, total = self.told(lambda: (-jnp.max(self.all_of("work")), jnp.sum(self.all_of("mass"))), jnp.int32, jnp.float32)
        return first, top, third, total

    def masses(self, floor: Array, pivot: Array, top: Array, third: Array) -> Array:
        """The mass of the logits of at least `floor` and above `pivot`; each slot's in shared memory."""

        def weight(x: Array) -> Array:
            seen = jnp.logical_and(x >= floor, x > pivot)
            return jnp.where(seen, jnp.exp2((x - top) * self.rate), 0.0)

        def kept() -> Array:
            return functools.reduce(jnp.add, [weight(self.mine("kept", i)[...]) for i in range(KEPT)])

        def streamed() -> Array:
            return self.stream(self.full(0.0), lambda _, x, carry: carry + weight(x))

        mass = lax.cond(third < jnp.maximum(floor, pivot), kept, streamed)
        self.mine("mass")[...] = mass
        return self.told(lambda: (jnp.sum(self.all_of("mass")),), jnp.float32)[0]

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
                return tuple(jnp.sum(counts) for counts in counts_of(self.all_of("work")))

            def counts(s: Array, t: Array) -> tuple[Array, Array]:
                bounds = threshold(s), threshold(t)
                self.mine("work")[...] = self.stream(self.full(0, jnp.int32), lambda _, x, carry: carry + reach(x, *bounds))
                return self.told(sums, jnp.int32, jnp.int32)  # type: ignore[return-value]

            # Most often all that counts is kept, and it only takes a pass to know.
            found = search(k, low, high, counts, low_first=True)
            return self.told(lambda: (value(found),), jnp.float32)[0]

        # Every logit above `third` is kept. Where the k-th that is kept is not above it, neither is the k-th of all.
        low, high, floor = self.told(among_kept, jnp.int32, jnp.int32, jnp.float32)
        return lax.cond(third < floor, lambda: floor, exact)

    def draw_slot(self, key: tuple[Array, Array], turn: Array) -> Array:
        """A slot by its mass in shared memory: the one with the largest mass / exponential variable."""
        size = self.spec.size
        slot = self.held(self.place() + self.wg * size)
        bits, _ = threefry(key, slot, turn)
        score = self.mine("mass")[...] / exponential(bits)
        self.mine("score")[...] = score

        def winner() -> tuple[Array, ...]:
            scores = self.all_of("score")
            return (jnp.max(jnp.where(scores == jnp.max(scores), self.place(self.spec.tuning.groups), -1)),)

        return self.told(winner, jnp.int32)[0]

    def draw_in(
        self, slot: Array, key: tuple[Array, Array], turn: Array, floor: Array, pivot: Array, first: Array, top: Array
    ) -> tuple[Array, Array]:
        """A token of the slot, and its logit, by the weights of those of at least `floor` and above `pivot`."""
        spec, size = self.spec, jnp.int32(self.spec.size)
        owner, place = lax.div(slot, size), lax.rem(slot, size)
        line, column = lax.div(slot, jnp.int32(COLUMNS)), lax.rem(slot, jnp.int32(COLUMNS))
        tokens = [slot + step * spec.tuning.groups * spec.size for step in range(spec.steps - 1)]
        values = [self.lines[self.row, line + step * spec.tuning.groups * spec.tuning.lines, column] for step in range(spec.steps - 1)]
        wanted, begin = self.begin(jnp.int32(spec.steps - 1), owner)
        tokens.append(begin + place)
        value = self.lines[self.row, lax.div(tokens[-1], jnp.int32(COLUMNS)), column]
        values.append(jnp.where(tokens[-1] >= wanted, value, -jnp.inf))

        def ban(i, values):  # type: ignore[no-untyped-def]
            banned = self.banned[self.row, i]
            return tuple(jnp.where(token == banned, -jnp.inf, value) for token, value in zip(tokens, values, strict=True))

        values = list(lax.fori_loop(0, self.bans, ban, tuple(values)))
        sums, total = [], jnp.float32(0)
        for value in values:
            seen = jnp.logical_and(value >= floor, value > pivot)
            total = total + jnp.where(seen, jnp.exp2((value - top) * self.rate), 0.0)
            sums.append(total)
        bits, _ = threefry(key, jnp.int32(COLUMN_DRAW), turn)
        goal = uniform(bits) * total
        token, found = first, top
        # From the last to the first: the one that stays is the first whose sum is above the goal, so it has added to it.
        for i in reversed(range(len(values))):
            here = sums[i] > goal
            token, found = jnp.where(here, tokens[i], token), jnp.where(here, values[i], found)
        return token, found
