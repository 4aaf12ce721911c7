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

from pallas_kernels.draw.bits import exponential, float_of, ordered, threefry, uniform
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

        first, top, total = block.first_pass()
        whole = jnp.logical_and(jnp.logical_and(top > LOWEST, top < jnp.inf), total == total)
        token = jnp.where(whole, first, jnp.int32(BROKEN))
        plain = jnp.logical_and(whole, greedy == 0)

        def drawn() -> Array:
            floor = lax.cond(top_k > 0, lambda: block.kth(top_k, top), lambda: jnp.float32(-jnp.inf))
            floor = jnp.maximum(floor, top + reach)
            everything = floor <= LOWEST
            mass = lax.cond(everything, lambda: total, lambda: block.masses(floor, jnp.float32(-jnp.inf), top))
            wanted = jnp.where(top_p >= 1, jnp.float32(jnp.inf), top_p * mass)

            def again(carry):  # type: ignore[no-untyped-def]
                return carry[0] == 0

            def one(carry):  # type: ignore[no-untyped-def]
                _, turn, pivot, _ = carry
                slot = block.draw_slot(key, turn)
                chosen, value = block.draw_in(slot, key, turn, floor, pivot, first, top)
                above = lax.cond(top_p >= 1, lambda: jnp.float32(0), lambda: block.masses(floor, value, top))
                # The largest logit is always allowed, whatever rounding says.
                good = jnp.logical_or(above < wanted, value >= top)
                return good.astype(jnp.int32), turn + 1, value, chosen

            return lax.while_loop(again, one, (jnp.int32(0), jnp.int32(0), jnp.float32(-jnp.inf), first))[3]

        token = lax.cond(plain, drawn, lambda: token)

        @pl.when(wg == 0)
        def _() -> None:
            out_ref[row] = token

    scratch = {
        "ring": plgpu.SMEM((W, stages, N, COLUMNS), jnp.float32),
        "kept": plgpu.SMEM((W, KEPT, N, COLUMNS), jnp.float32),
        "mass": plgpu.SMEM((W, N, COLUMNS), jnp.float32),
        "share_f": plgpu.SMEM((W, 4), jnp.float32),
        "share_i": plgpu.SMEM((W, 4), jnp.int32),
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

    def shared(self, floats: tuple[Array, ...] = (), ints: tuple[Array, ...] = ()) -> tuple[list[list[Array]], list[list[Array]]]:
        """Every warpgroup's values of each given scalar, in their order."""
        W = self.spec.tuning.groups
        if W == 1:
            return [[x] for x in floats], [[x] for x in ints]
        for i, x in enumerate(floats):
            self.sm["share_f"][self.wg, i] = x
        for i, x in enumerate(ints):
            self.sm["share_i"][self.wg, i] = x
        self.meet()
        found_f = [[self.sm["share_f"][w, i] for w in range(W)] for i in range(len(floats))]
        found_i = [[self.sm["share_i"][w, i] for w in range(W)] for i in range(len(ints))]
        self.meet()
        return found_f, found_i

    def place(self) -> Array:
        """The number of each slot of this warpgroup within it."""
        layout = plgpu.Layout.WG_STRIDED(self.shape, vec_size=4)
        line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=layout)
        return line * COLUMNS + plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=layout)

    def load(self, ref: Any) -> Array:
        return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED(self.shape, vec_size=4))

    def full(self, value: float, dtype: Any = jnp.float32) -> Array:
        return plgpu.layout_cast(jnp.full(self.shape, value, dtype), plgpu.Layout.WG_STRIDED(self.shape, vec_size=4))

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
        for step in range(min(stages, spec.steps)):
            copy(jnp.int32(step))

        def take(step, carry, last=False):  # type: ignore[no-untyped-def]
            at = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(self.sm["full"].at[self.wg * stages + at])
            x = self.load(self.sm["ring"].at[self.wg, at])
            plgpu.commit_smem()
            pl.when(step + stages < spec.steps)(lambda: copy(step + stages))
            wanted, begin = self.begin(step, self.wg)

            def ban(i, x):  # type: ignore[no-untyped-def]
                return jnp.where(self.place() == self.banned[self.row, i] - begin, -jnp.inf, x)

            x = lax.fori_loop(0, self.bans, ban, x)
            if last:
                x = jnp.where(self.place() >= wanted - begin, x, -jnp.inf)
            return use(step, x, carry)

        carry = lax.fori_loop(0, spec.steps - 1, take, init)
        return take(jnp.int32(spec.steps - 1), carry, last=True)

    def first_pass(self) -> tuple[Array, Array, Array]:
        """The first token of the largest logit, that logit, and the mass of all tokens; each slot's largest and mass in shared memory."""
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
        (tops,), _ = self.shared((jnp.max(m1),))
        top = functools.reduce(jnp.maximum, tops)
        mass = mass * jnp.exp2((m1 - top) * rate)
        wanted = (where * self.spec.tuning.groups + self.wg) * self.spec.size
        token = jnp.minimum(wanted, self.spec.V - self.spec.size) + self.place()
        first = -jnp.max(jnp.where(m1 == top, -token, jnp.int32(-(2**31) + 1)))
        for i, m in enumerate((m1, m2, m3)):
            self.sm["kept"].at[self.wg, i][...] = m
        self.sm["mass"].at[self.wg][...] = mass
        (masses,), (firsts,) = self.shared((jnp.sum(mass),), (first,))
        return functools.reduce(jnp.minimum, firsts), top, functools.reduce(jnp.add, masses)

    def known(self, floor: Array) -> Array:
        """Whether every token with a logit of at least `floor` is among the largest of its slot."""
        missing = jnp.max(jnp.where(self.load(self.sm["kept"].at[self.wg, KEPT - 1]) >= floor, 1, 0))
        _, (missing_all,) = self.shared((), (missing,))
        return functools.reduce(jnp.maximum, missing_all) == 0

    def masses(self, floor: Array, pivot: Array, top: Array) -> Array:
        """The mass of the logits of at least `floor` and above `pivot`; each slot's in shared memory."""

        def weight(x: Array) -> Array:
            seen = jnp.logical_and(x >= floor, x > pivot)
            return jnp.where(seen, jnp.exp2((x - top) * self.rate), 0.0)

        def kept() -> Array:
            return weight(self.kept(0)) + weight(self.kept(1)) + weight(self.kept(2))

        def streamed() -> Array:
            return self.stream(self.full(0.0), lambda _, x, carry: carry + weight(x))

        mass = lax.cond(self.known(jnp.maximum(floor, pivot)), kept, streamed)
        self.sm["mass"].at[self.wg][...] = mass
        (masses,), _ = self.shared((jnp.sum(mass),))
        return functools.reduce(jnp.add, masses)

    def kept(self, i: int) -> Array:
        return self.load(self.sm["kept"].at[self.wg, i])

    def kth(self, k: Array, top: Array) -> Array:
        """A threshold that exactly the k largest logits and those equal to the k-th reach."""

        def counted(x: Array, t: Array) -> Array:
            return jnp.where(ordered(x) >= t, 1, 0)

        def among_kept(t: Array) -> Array:
            return jnp.sum(counted(self.kept(0), t) + counted(self.kept(1), t) + counted(self.kept(2), t))

        def among_all(t: Array) -> Array:
            return jnp.sum(self.stream(self.full(0, jnp.int32), lambda _, x, carry: carry + counted(x, t)))

        highest = self._scalar(ordered, top)
        low = self._search(k, self._scalar(ordered, jnp.float32(LOWEST)), highest, among_kept)
        floor = self._scalar(float_of, low)

        def exact() -> Array:
            return self._scalar(float_of, self._search(k, low, highest, among_all))

        return lax.cond(self.known(floor), lambda: floor, exact)

    def _scalar(self, image: Callable[[Array], Array], x: Array) -> Array:
        """`image(x)` of a scalar, by way of an array: scalars have no bit casts."""
        layout = plgpu.Layout.WG_STRIDED(self.shape, vec_size=4)
        return jnp.max(image(plgpu.layout_cast(jnp.full(self.shape, x), layout)))

    def _search(self, k: Array, low: Array, high: Array, count: Callable[[Array], Array]) -> Array:
        """The largest t in [low, high] that k logits reach, or any t that exactly k reach; low where there is none. Ordered integers."""

        def going(carry):  # type: ignore[no-untyped-def]
            low, high, found = carry
            return jnp.logical_and(low < high, found == 0)

        def halve(carry):  # type: ignore[no-untyped-def]
            low, high, _ = carry
            # Rounded up, without overflow.
            middle = (low | high) - lax.shift_right_arithmetic(low ^ high, jnp.int32(1))
            _, (counts,) = self.shared((), (count(middle),))
            reached = functools.reduce(jnp.add, counts)
            enough = reached >= k
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1), (reached == k).astype(jnp.int32)

        return lax.while_loop(going, halve, (low, high, jnp.int32(0)))[0]

    def draw_slot(self, key: tuple[Array, Array], turn: Array) -> Array:
        """A slot by its mass in shared memory: the one with the largest mass / exponential variable."""
        size = self.spec.size
        slot = self.place() + self.wg * size
        bits, _ = threefry(key, slot, jnp.full_like(slot, turn))
        mass = self.load(self.sm["mass"].at[self.wg])
        score = mass / exponential(bits)
        best = jnp.max(score)
        mine = jnp.max(jnp.where(score == best, slot, -1))
        (scores,), (slots,) = self.shared((best,), (mine,))
        score, found = scores[0], slots[0]
        for other, at in zip(scores[1:], slots[1:], strict=True):
            found = jnp.where(other > score, at, found)
            score = jnp.maximum(score, other)
        return found

    def draw_in(
        self, slot: Array, key: tuple[Array, Array], turn: Array, floor: Array, pivot: Array, first: Array, top: Array
    ) -> tuple[Array, Array]:
        """A token of the slot, and its logit, by the weights of those of at least `floor` and above `pivot`."""
        size = jnp.int32(self.spec.size)
        owner, place = lax.div(slot, size), lax.rem(slot, size)
        tokens, values = [], []
        for step in range(self.spec.steps):
            wanted, begin = self.begin(jnp.int32(step), owner)
            token = begin + place
            value = self.lines[self.row, lax.div(token, jnp.int32(COLUMNS)), lax.rem(token, jnp.int32(COLUMNS))]
            tokens.append(token)
            values.append(jnp.where(token >= wanted, value, -jnp.inf) if step == self.spec.steps - 1 else value)

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
        # From the last to the first: the one that stays is the first whose sum is above the goal.
        before = [jnp.float32(0), *sums[:-1]]
        for i in reversed(range(len(values))):
            here = jnp.logical_and(sums[i] > goal, sums[i] > before[i])
            token, found = jnp.where(here, tokens[i], token), jnp.where(here, values[i], found)
        return token, found
