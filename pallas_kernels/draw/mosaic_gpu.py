"""Draws of tokens for NVIDIA Hopper in Pallas Mosaic GPU: one thread block a row.

Warpgroups stream the chunks of a row in turn through rings of TMA copies. Chunks of a warpgroup lie
on top of each other: tokens at the same place of its chunks form a slot. The first pass keeps each
slot's three largest logits and its mass.

A draw picks a slot by mass (an exponential race), then a token of the slot. min_p and top_k are a
floor on the logits. top_p is by rejection: a token is allowed if the mass above it is small enough.
A round draws a few candidates and accepts the first allowed one. If none is allowed, the next round
draws from the tokens above the largest candidate. Every round draws from a set that holds all
allowed tokens, so an accepted token follows the softmax over the allowed ones.

Counts and masses come from the kept logits if these hold all tokens in question, else from another
pass over the row.
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

from pallas_kernels.draw import BROKEN, MIN_TEMPERATURE, DrawRows
from pallas_kernels.draw.mosaic_block import COLUMNS, KEPT, Spec, Tuning
from pallas_kernels.draw.mosaic_row import LOWEST, Row
from pallas_kernels.mosaic_gpu import launch

LOG2E = math.log2(math.e)


def check(logits_BV: Array, tuning: Tuning | None = None) -> None:
    """Raise ValueError for logits that the kernel does not support."""
    V = logits_BV.shape[-1]
    if logits_BV.dtype != jnp.float32:
        raise ValueError(f"mosaic_gpu draw takes float32 logits, got {logits_BV.dtype}")
    least = (tuning or Tuning()).lines * COLUMNS
    if V % COLUMNS or V < least:
        raise ValueError(
            f"mosaic_gpu draw takes a multiple of {COLUMNS} logits a row, at least {least}, got {V}"
        )


def draw(
    logits_BV: Array,
    rows: DrawRows,
    *,
    filters: bool = True,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Array:
    """See `pallas_kernels.draw`. float32; a multiple of 128 logits a row, at least 1024. Raises
    ValueError otherwise.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    del filters  # each row pays for its own filters alone
    tuning = tuning or Tuning()
    check(logits_BV, tuning)
    B, V = logits_BV.shape
    spec = Spec(B, V, rows.banned_BK.shape[1], tuning, interpret)
    greedy_B = rows.temperature_B < MIN_TEMPERATURE
    rate_B = LOG2E / jnp.where(greedy_B, 1.0, rows.temperature_B)
    # min_p as a difference of raw logits: the smallest kept logit minus the largest, ≤ 0.
    reach_B = jnp.log2(rows.min_p_B) / rate_B
    top_k_B = jnp.where((rows.top_k_B <= 0) | (rows.top_k_B >= V), 0, rows.top_k_B)
    # Leading columns of banned tokens that a row uses
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


def _launch(spec: Spec, lines: Array, ints: Array, floats: Array, banned: Array) -> Array:
    W = spec.tuning.groups
    N = spec.tuning.lines
    stages = spec.tuning.stages

    def draw_token(lines_ref, ints_ref, floats_ref, banned_ref, out_ref, **sm):  # type: ignore[no-untyped-def]
        row = lax.axis_index("row")
        wg = lax.axis_index("wg")
        block = Row(spec, row, wg, lines_ref, banned_ref, ints_ref[row, 2], floats_ref[row, 0], sm)
        greedy = ints_ref[row, 0]
        top_k = ints_ref[row, 1]
        key = ints_ref[row, 3], ints_ref[row, 4]
        reach = floats_ref[row, 1]
        top_p = floats_ref[row, 2]

        first, top, third, total = block.first_pass()
        finite = jnp.logical_and(jnp.logical_and(top > LOWEST, top < jnp.inf), total == total)
        token = jnp.where(finite, first, jnp.int32(BROKEN))
        random = jnp.logical_and(finite, greedy == 0)

        def drawn() -> Array:
            floor = lax.cond(
                top_k > 0, lambda: block.kth(top_k, top, third), lambda: jnp.float32(-jnp.inf)
            )
            floor = jnp.maximum(floor, top + reach)
            unfiltered = floor <= LOWEST

            count = jnp.where(top_p >= 1, 1, jnp.int32(spec.candidates))

            def draw_round(carry):  # type: ignore[no-untyped-def]
                """Accept a candidate of the last turn by the mass above it, or draw new ones. The
                first turn has no candidates and takes the mass of all tokens.

                This order needs one `masses` in the program: each is a quarter of the lowering
                time.
                """
                _, turn, _, wanted, tokens, values = carry
                fresh = turn == 0
                known = jnp.where(fresh, unfiltered, top_p >= 1)
                known_mass = jnp.where(fresh, total, jnp.float32(0))
                masses = lax.cond(
                    known,
                    lambda: (known_mass,) * spec.candidates,
                    lambda: block.masses(floor, values, top, third),
                )
                wanted = jnp.where(
                    fresh, jnp.where(top_p >= 1, jnp.float32(jnp.inf), top_p * masses[0]), wanted
                )
                chosen = first
                good = jnp.int32(0)
                for token, value, mass in reversed(list(zip(tokens, values, masses, strict=True))):
                    # The largest logit is always allowed, whatever rounding gives.
                    stays = jnp.logical_and(turn > 0, jnp.logical_or(mass < wanted, value >= top))
                    chosen = jnp.where(stays, token, chosen)
                    good = jnp.where(stays, jnp.int32(1), good)
                pivot = functools.reduce(jnp.maximum, values)
                more = lambda: block.draw_each(count, key, turn, floor, pivot, first, top)
                tokens, values = lax.cond(good > 0, lambda: (tokens, values), more)
                return good, turn + 1, chosen, wanted, tokens, values

            none = (first,) * spec.candidates, (jnp.float32(-jnp.inf),) * spec.candidates
            start = jnp.int32(0), jnp.int32(0), first, jnp.float32(0), *none
            return lax.while_loop(lambda carry: carry[0] == 0, draw_round, start)[2]

        token = lax.cond(random, drawn, lambda: token)

        @pl.when(wg == 0)
        def _() -> None:
            out_ref[row] = token

    scratch = {
        "ring": plgpu.SMEM((W, stages, N, COLUMNS), jnp.float32),
        "kept": plgpu.SMEM((KEPT, W * N, COLUMNS), jnp.float32),
        "mass": plgpu.SMEM((W * N, COLUMNS), jnp.float32),
        "score": plgpu.SMEM((spec.candidates, W * N, COLUMNS), jnp.float32),
        "floats": plgpu.SMEM((4,), jnp.float32),
        "ints": plgpu.SMEM((4,), jnp.int32),
        "values": plgpu.SMEM((spec.candidates,), jnp.float32),
        "tokens": plgpu.SMEM((spec.candidates,), jnp.int32),
        "full": plgpu.Barrier(num_barriers=W * stages),
        "sync": plgpu.Barrier(num_arrivals=W),
    }
    return launch(
        draw_token,
        (lines, ints, floats, banned),
        spec.interpret,
        out_type=jax.ShapeDtypeStruct((spec.B,), jnp.int32),
        scratch_types=scratch,
        grid=(spec.B,),
        grid_names=("row",),
        num_threads=W,
        thread_name="wg",
    )
