"""A routed feed-forward in one launch for NVIDIA Hopper: gate and up, the activation, and down.

Blocks compute the units of gate and up, then those of down. Nothing lies between the two: a
producer copies weights and never waits for tokens, so that those of down come while the last units
of gate and up are multiplied. A second producer copies tokens, and waits until all hidden columns
of a tile are written. All blocks run at the same time, so what one waits for is always computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_matmul.gating import Gating
from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.grouped_matmul.experts import Experts
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.mosaic_gpu import (
    Spec,
    Unit,
    consume,
    copy_tokens,
    copy_weight,
    scratch_of,
    tile_rows,
    unit_at,
)
from pallas_kernels.grouped_matmul.plan import ONE_LAUNCH, PROCESSORS, Tuning, tuning_of
from pallas_kernels.mosaic_gpu import (
    PRODUCER_REGISTERS,
    await_flag,
    drain,
    launch,
    padded,
    raise_flag,
    registers_of,
    take,
)
from pallas_kernels.target import Target

type Places = tuple[Array, Callable[[Array], Array]]  # own units: how many, and the number of each


def prefers(target: Target, x_PI: Array, experts: Experts, groups: Groups, gating: Gating) -> bool:
    """For as many tokens as two products were measured to be slower, on a card where all blocks run
    at once: with fewer processors some would wait for others that never start."""
    tokens = groups.place_TK.shape[0]
    return tokens in ONE_LAUNCH and target.processors >= PROCESSORS


def check(x_PI: Array, experts: Experts, groups: Groups, gating: Gating) -> None:
    """Raise ValueError unless `mosaic_gpu` takes both products."""
    down = experts.down_EDF
    hidden = jax.ShapeDtypeStruct((groups.rows, down.shape[2]), x_PI.dtype)
    mosaic_gpu.check(x_PI, experts.gate_up_EOI, groups, gating)
    mosaic_gpu.check(hidden, down, groups, None)


def feed_forward(
    x_PI: Array,
    weights: Experts,
    groups: Groups,
    gating: Gating,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """down(gating(gate(x), up(x))) of each row's expert, `y_PD`: what two calls of `grouped_matmul`
    give, bit for bit. Raises what `check` raises.

    The interpreter has no flags, and would report reads of other blocks' hidden rows as races.
    There the kernel runs twice, for one product each.
    """
    (tiles,) = groups.expert_W.shape
    tile = groups.tile
    x_PI = tile_rows(x_PI, groups, interpret)
    sizes = tuning or tuning_of(tile)
    hidden_PF = jax.ShapeDtypeStruct((tiles * tile, weights.down_EDF.shape[2]), x_PI.dtype)

    def spec(x: Any, w: Any, gating: Gating | None) -> Spec:
        mosaic_gpu.check(x, w, groups, gating)
        shared = x.shape[0] < tiles * tile
        _, O, I = w.shape
        plan = tiles, tile, groups.shared, shared
        return Spec(*plan, O, I, gating, x.dtype, sizes, interpret)

    pair = spec(x_PI, weights.gate_up_EOI, gating), spec(hidden_PF, weights.down_EDF, None)
    biased = tuple(bias is not None for bias in weights[2:])
    arrays = [groups.expert_W, groups.used, *(() if groups.shared else (groups.rows_W,))]
    arrays += [padded(x_PI), *(array for array in weights if array is not None)]
    flags_W = jnp.zeros((tiles,), jnp.int32)
    if interpret is None:
        return _launch(pair, biased, "both", (jax.new_ref(flags_W), *arrays))[1]
    hidden_PF, _ = _launch(pair, biased, "first", (flags_W, *arrays))
    return _launch(pair, biased, "second", (flags_W, *arrays, hidden_PF))[1]


class _Product(NamedTuple):
    """One of the two products: its refs, and those of its bias, if any."""

    spec: Spec
    x_ref: Any
    w_ref: Any
    bias_ref: tuple[Any, ...]
    y_ref: Any


@dataclass(frozen=True)
class _Block:
    """What a block knows: both products, the plan, its shared memory and its units."""

    products: tuple[_Product, _Product]
    flags_ref: Any
    expert_ref: Any
    rows_ref: Any
    sm: dict[str, Any]
    phase: str
    places: tuple[Places, Places]

    @property
    def first(self) -> Spec:
        return self.products[0].spec

    def each_unit(self, run: Callable[[int, _Product, Unit, Array], None]) -> Array:
        """Call `run(0 or 1, product, unit, steps done before)` for each own unit; returns the steps
        done."""
        done = jnp.int32(0)
        for number in {"first": (0,), "second": (1,), "both": (0, 1)}[self.phase]:
            product = self.products[number]
            count, place = self.places[number]

            def body(i, done, number=number, product=product, place=place):  # type: ignore[no-untyped-def]
                unit = unit_at(product.spec, place(i), self.expert_ref, self.rows_ref)
                run(number, product, unit, done)
                return done + product.spec.steps

            done = lax.fori_loop(0, count, body, done)
        return done

    def fill(self, copy: Callable[..., None], before: Callable[[int, Unit], None]) -> None:
        """A producer: call `copy` for each step of each own unit, and `before` a unit's steps."""
        free = self.sm["free"]
        stages = self.first.tuning.stages

        def unit_steps(number: int, product: _Product, unit: Unit, done: Array) -> None:
            before(number, unit)

            @pl.loop(0, product.spec.steps)
            def _(t):  # type: ignore[no-untyped-def]
                slot = take(free, done + t, stages)
                if copy is copy_tokens:
                    source = product.x_ref
                else:
                    source = product.w_ref
                copy(product.spec, source, unit, t, slot, self.sm)

        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        drain(free, self.each_unit(unit_steps), stages)

    def await_hidden(self, number: int, unit: Unit) -> None:
        """Wait for all columns of a tile's hidden rows."""
        if number == 1 and self.phase == "both":
            writers = self.first.across * self.first.tuning.warpgroups
            await_flag(self.flags_ref.at[unit.tile], jnp.int32(writers), lower=False)

    def compute(self, wg: Array) -> None:
        """A warpgroup that multiplies."""

        def run(number: int, product: _Product, unit: Unit, done: Array) -> None:
            consume(product.spec, unit, done, wg, self.sm, (*product.bias_ref, product.y_ref))
            if number == 0 and self.phase == "both":
                plgpu.wait_smem_to_gmem(0)
                raise_flag(self.flags_ref.at[unit.tile])

        plgpu.set_max_registers(registers_of(self.first.tuning.warpgroups, 2), action="increase")
        self.each_unit(run)
        plgpu.wait_smem_to_gmem(0)


def _launch(
    pair: tuple[Spec, Spec], biased: tuple[bool, ...], phase: str, arrays: tuple[Any, ...]
) -> tuple[Array, Array]:
    """Hidden rows and y. `arrays` are flags, the plan, x, weights, the biases that there are and,
    for the phase "second" alone, the hidden rows."""
    first, second = pair
    warpgroups = first.tuning.warpgroups
    blocks = min(PROCESSORS, first.tiles * max(first.across, second.across))

    def kernel(flags_ref, expert_ref, used_ref, *rest, **sm):  # type: ignore[no-untyped-def]
        *input_refs, hidden_ref, y_ref = rest
        rows_ref = None
        if first.rows is None:
            rows_ref = input_refs.pop(0)
        if phase == "second":
            source_ref = input_refs.pop()
        else:
            source_ref = hidden_ref
        x_ref, gate_up_ref, down_ref, *bias_refs = input_refs
        gate_up_bias, down_bias = ((bias_refs.pop(0),) if has else () for has in biased)
        products = (
            _Product(first, x_ref, gate_up_ref, gate_up_bias, hidden_ref),
            _Product(second, source_ref, down_ref, down_bias, y_ref),
        )
        places = places_of(pair, used_ref[used_ref.shape[0] - 1], lax.axis_index("block"), blocks)
        block = _Block(products, flags_ref, expert_ref, rows_ref, sm, phase, places)
        wg = lax.axis_index("wg")
        pl.when(wg == warpgroups)(lambda: block.fill(copy_weight, lambda number, unit: None))
        pl.when(wg == warpgroups + 1)(lambda: block.fill(copy_tokens, block.await_hidden))
        pl.when(wg < warpgroups)(lambda: block.compute(wg))

    kernel.__name__ = f"grouped_feed_forward_{first.tile}x{first.O}x{first.I}"  # for profiles
    rows = first.tiles * first.tile
    hidden_PF, y_PD = launch(
        kernel,
        arrays,
        first.interpret,
        out_type=[jax.ShapeDtypeStruct((rows, spec.F), spec.dtype) for spec in pair],
        scratch_types=scratch_of(first),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 2,
        thread_name="wg",
    )
    return hidden_PF, y_PD


def places_of(
    pair: tuple[Spec, Spec], used: Array, block: Array, blocks: int
) -> tuple[Places, Places]:
    """A block's units of both products. Units of the first go round the blocks. In its last round
    some blocks are idle: they begin with the second, for as many rounds of theirs as that takes,
    and then its units go round all blocks."""
    first, second = pair
    units = used * first.across
    total = used * second.across
    over = lax.rem(units, jnp.int32(blocks))  # blocks that have a unit in the last round
    idle = jnp.where(over == 0, 0, blocks - over)
    place = lax.rem(block - over + blocks, jnp.int32(blocks))  # idle blocks first
    rounds = jnp.where(place < idle, round(first.steps / second.steps), 0)
    early_units = jnp.clip(_rounds(total - place, jnp.maximum(idle, 1)), 0, rounds)
    start = idle * round(first.steps / second.steps) + place
    count = early_units + jnp.maximum(_rounds(total - start, jnp.int32(blocks)), 0)

    def second_place(i: Array) -> Array:
        return jnp.where(i < early_units, place + i * idle, start + (i - early_units) * blocks)

    counted = jnp.maximum(_rounds(units - block, jnp.int32(blocks)), 0)
    return (counted, lambda i: block + i * blocks), (count, second_place)


def _rounds(units: Array, blocks: Array) -> Array:
    """Rounds in which so many units go round so many blocks."""
    return lax.div(units + blocks - 1, blocks)
