"""The second Hopper kernel of paged decode: merges the parts of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.mosaic_flash import ROWS, Spec, empty, fold, zero_tail
from pallas_kernels.paged_decode.plan import DecodePlan


def combine(spec: Spec, part_o: Array, part_lse: Array, plan: DecodePlan) -> Array:
    """Merges each row's parts into `o_BNH`: ROWS // group parts a step, each (part, query head) a key that only its own query sees."""
    H, G, group, ahead = spec.H, spec.G, spec.group, 2

    def decode_combine(o_parts, lse_parts, parts_ref, o_ref, **sm):  # type: ignore[no-untyped-def]
        b, h = lax.axis_index("row"), lax.axis_index("head")
        first, count = parts_ref[b, 0] * group, parts_ref[b, 1] * group
        shift = spec.first_query(b, h)[1]
        steps = lax.div(count + ROWS - 1, jnp.int32(ROWS))
        columns = [pl.ds(c * spec.width, spec.width) for c in range(H // spec.width)]

        def store(begin):  # type: ignore[no-untyped-def]
            for c, column in enumerate(columns):
                plgpu.copy_smem_to_gmem(sm["o"].at[c, pl.ds(begin, G)], o_ref.at[b, pl.ds(h * G, G), column])

        def fetch(c):  # type: ignore[no-untyped-def]
            slot = lax.rem(c, jnp.int32(ahead))
            rows = pl.ds(pl.multiple_of(first + c * ROWS, group), ROWS)
            plgpu.copy_gmem_to_smem(o_parts.at[h, rows], sm["v"].at[slot], sm["full"].at[slot])

        def step(c, carry):  # type: ignore[no-untyped-def]
            slot = lax.rem(c, jnp.int32(ahead))
            rows = pl.ds(pl.multiple_of(first + c * ROWS, group), ROWS)
            lse = plgpu.load(lse_parts.at[h, rows], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            query = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 0, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, (ROWS, ROWS), 1, layout=plgpu.Layout.WGMMA)
            own = jnp.logical_and(lax.bitwise_and(key, jnp.int32(group - 1)) == query, key < count - c * ROWS)
            scores = jnp.where(own, lax.broadcast_in_dim(lse, (ROWS, ROWS), [1]), -jnp.inf)
            plgpu.barrier_wait(sm["full"].at[slot])
            zero_tail(sm["v"].at[slot], ROWS, H, count - c * ROWS)
            carry = fold(spec, carry, scores, sm["v"].at[slot], sm.get("p"))
            pl.when(c + ahead < steps)(lambda: fetch(c + ahead))
            return carry

        @pl.when(count == group)  # one part is the result
        def _() -> None:
            for c, column in enumerate(columns):
                plgpu.copy_gmem_to_smem(o_parts.at[h, pl.ds(first + shift, G), column], sm["o"].at[c, pl.ds(0, G)], sm["one"])
            plgpu.barrier_wait(sm["one"])
            store(0)

        @pl.when(count != group)  # several, or none: a dead row gives zeros
        def _() -> None:
            pl.loop(0, jnp.minimum(steps, ahead))(fetch)
            acc, _, total = lax.fori_loop(0, steps, step, empty(H))
            total = jnp.where(total > 0, total, 1.0)
            out = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(spec.dtype)
            for c in range(len(columns)):
                sm["o"].at[c][...] = out[:, c * spec.width : (c + 1) * spec.width]
            plgpu.commit_smem()
            store(shift)

        plgpu.wait_smem_to_gmem(0)

    scratch = {
        "v": plgpu.SMEM((ahead, ROWS, H), spec.dtype, transforms=spec.tiled),
        "o": plgpu.SMEM((H // spec.width, ROWS, spec.width), spec.dtype),
        "full": plgpu.Barrier(num_barriers=ahead),
        "one": plgpu.Barrier(num_arrivals=H // spec.width),
    }
    if spec.interpret is not None:
        scratch["p"] = plgpu.SMEM((ROWS, ROWS), spec.dtype, transforms=spec.tiled)
    grid = {"grid": (spec.B, spec.K), "grid_names": ("row", "head"), "num_threads": 1, "thread_name": "wg"}
    out = jax.ShapeDtypeStruct((spec.B, spec.K * G, H), spec.dtype)
    run = plgpu.kernel(decode_combine, out_type=out, scratch_types=scratch, **grid, **spec.options)
    return run(part_o, part_lse, plan.parts_B2)
