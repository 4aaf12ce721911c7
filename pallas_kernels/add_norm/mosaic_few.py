"""Sum and norm of few rows of a product whose shares of columns are yet to be added up, for NVIDIA
Hopper: one processor alone takes longer to load a row's shares than for all the rest.

A team has a row. Each member adds up some of its columns, and the first norms the row as
`mosaic_gpu` does, so that the bits are the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm.mosaic_norm import Delta, norm_of, norm_results, store_norm
from pallas_kernels.mosaic_gpu import THREADS, row_layout, store
from pallas_kernels.mosaic_team import (
    LOADED,
    PIECE,
    PIECE_LAYOUT,
    TEAM,
    Team,
    blocks_of,
)
from pallas_kernels.parts import Parts, Product
from pallas_kernels.scaled_matmul import Inputs, Rounding

MAX_WIDTH = 64 * THREADS
WORDS = PIECE // THREADS  # float32 numbers of a piece in a thread


def takes(delta_TD: Product) -> bool:
    """Whether a team is faster: where several shares are added up for few rows."""
    if not isinstance(delta_TD, Parts) or delta_TD.done is not None:
        return False
    T, D = delta_TD.shape
    shares = len(delta_TD.sums)
    blocks = blocks_of(T, None)
    fits = D % PIECE == 0 and D <= MAX_WIDTH
    return fits and blocks > 1 < shares and WORDS * shares * len(_pieces(D, 0)) <= LOADED[blocks]


def add_norm(
    x_TD: Array,
    delta: Delta,
    weight_D: Array,
    eps: float,
    rounding: Rounding | None,
    interpret: Any,
    blocks: int | None = None,
) -> tuple[Array, Inputs]:
    """See `mosaic_gpu.add_norm`, which has checked these; for what `takes` allows. The `blocks` of
    a row change only speed."""
    T, D = x_TD.shape
    team = Team(blocks or blocks_of(T, interpret))
    layout = row_layout(D)

    def add_norm_kernel(x_ref, *refs, row, met):  # type: ignore[no-untyped-def]
        count = len(delta.arrays)
        delta_refs = refs[:count]
        weight_ref, sum_ref, *norm_refs = refs[count:]
        t = lax.axis_index("row")
        member = team.member()

        def piece(span: Any) -> Array:
            """The sum of these columns."""

            def load(ref: Any) -> Array:
                return plgpu.load(ref.at[span], layout=PIECE_LAYOUT, optimized=False)

            terms = delta.terms(t, load, *delta_refs)
            wide = (term.astype(jnp.float32) for term in terms)
            return sum(wide, load(x_ref.at[t]).astype(jnp.float32)).astype(x_ref.dtype)

        def give(span: Any, total: Array) -> None:
            store(sum_ref.at[t, span], total)
            team.give(row.at[span], total, met)

        team.begin(met, told=2 * D)
        # Before the team meets, so that it comes during that
        weight = plgpu.load(weight_ref.at[pl.ds(0, D)], layout=layout, optimized=False)
        places = _pieces(D, member)
        held = [jnp.minimum(place, D // PIECE - 1) for place in places]
        columns = [pl.ds(pl.multiple_of(number * PIECE, PIECE), PIECE) for number in held]
        totals = [piece(span) for span in columns]
        team.ready()
        for place, span, total in zip(places, columns, totals, strict=True):
            pl.when(place < D // PIECE)(lambda span=span, total=total: give(span, total))
        team.done(met)

        @pl.when(member == 0)
        def _() -> None:
            team.wait(met)
            total = plgpu.load(row, layout=layout, optimized=False)
            store_norm(total, weight.astype(jnp.float32), eps, t, norm_refs)

    total, *norm = team.launch(
        add_norm_kernel,
        (x_TD, *delta.arrays, weight_D),
        T,
        interpret,
        out_type=(jax.ShapeDtypeStruct((T, D), x_TD.dtype), *norm_results(x_TD, rounding)),
        scratch_types={"row": plgpu.SMEM((D,), x_TD.dtype)},
    )
    return total, norm_of(x_TD, norm)


def _pieces(width: int, member: Any) -> list[Any]:
    """The pieces of a row for a member of its team; some have one that is beyond the row."""
    return [first + member for first in range(0, width // PIECE, TEAM)]
