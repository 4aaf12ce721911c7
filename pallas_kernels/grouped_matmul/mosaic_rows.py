"""Copies tokens to the rows of their experts, for NVIDIA Hopper: each is read once and written once
a choice. A gather would also fill the rows that no token takes, which may be twice as many."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.mosaic_gpu import THREADS, launch, row_layout, store


def spread(x_TD: Array, groups: Groups, interpret: Any) -> Array:
    """The rows of all tiles; those that no token takes hold whatever was there."""
    T, D = x_TD.shape
    K = groups.place_TK.shape[1]
    if D % THREADS not in (0, THREADS // 2) or D < THREADS:
        return groups.rows_of(x_TD)
    # Whole turns of the threads, the last of which may begin before the one before it ends
    pieces = [pl.ds(0, D - D % THREADS), *([pl.ds(D - THREADS, THREADS)] if D % THREADS else [])]

    def kernel(x_ref, place_ref, y_ref):  # type: ignore[no-untyped-def]
        t = lax.axis_index("token")
        for piece in pieces:
            layout = row_layout(piece.size, x_TD.dtype)
            part = plgpu.load(x_ref.at[t, piece], layout=layout, optimized=False)
            for k in range(K):
                store(y_ref.at[place_ref[t, k], piece], part)

    kernel.__name__ = f"spread_{T}x{D}"  # for profiles
    rows = groups.expert_W.shape[0] * groups.tile
    spread_rows: Array = launch(
        kernel,
        (x_TD, groups.place_TK),
        interpret,
        out_type=jax.ShapeDtypeStruct((rows, D), x_TD.dtype),
        grid=(T,),
        grid_names=("token",),
        # No thread reads what another one stores
        compiler={"unsafe_no_auto_barriers": True},
    )
    return spread_rows
