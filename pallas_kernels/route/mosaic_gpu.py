"""Routing for NVIDIA Hopper in one small launch: a warp a token, then the tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import Groups, tiles_of
from pallas_kernels.lanes import LANES, Machine, run, sync
from pallas_kernels.mosaic_gpu import launch, store
from pallas_kernels.route import mosaic_lanes as lanes
from pallas_kernels.route.mosaic_lanes import Spec, Weighing
from pallas_kernels.route.rules import Rule, normalised, softmax, unchanged

MOST_TOKENS, MOST_EXPERTS, MOST_CHOICES = 256, 256, 16
MOST_WARPGROUPS = 4
WEIGHINGS = {
    (softmax, unchanged): Weighing(sigmoid=False, normalised=False),
    (softmax, normalised): Weighing(sigmoid=False, normalised=True),
    (unchanged, softmax): Weighing(sigmoid=False, normalised=True),
    (jax.nn.sigmoid, unchanged): Weighing(sigmoid=True, normalised=False),
    (jax.nn.sigmoid, normalised): Weighing(sigmoid=True, normalised=True),
}


def check(logit_TE: Array, rule: Rule, tile: int) -> None:
    """Raise ValueError for shapes and rules that the kernel does not support."""
    T, E = logit_TE.shape
    if logit_TE.dtype != jnp.float32 or T > MOST_TOKENS or E > MOST_EXPERTS or not T * E:
        raise ValueError(
            f"mosaic_gpu route takes float32 logits of 1 to {MOST_TOKENS} tokens and 1 to "
            f"{MOST_EXPERTS} experts, got {logit_TE.dtype}{list(logit_TE.shape)}"
        )
    if not 1 <= rule.choices <= min(E, MOST_CHOICES):
        raise ValueError(
            f"mosaic_gpu route takes 1 to {MOST_CHOICES} choices of {E} experts, got {rule.choices}"
        )
    if rule.limit is not None or (rule.score, rule.weigh) not in WEIGHINGS:
        raise ValueError(
            "mosaic_gpu route takes softmax or sigmoid, normalised or not, without a limit of "
            f"groups, got {rule}"
        )
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"mosaic_gpu route takes tiles of a power of two of rows, got {tile}")


def route(
    logit_TE: Array, correction_E: Array | None, rule: Rule, tile: int, *, interpret: Any = None
) -> tuple[Groups, Array]:
    """See `pallas_kernels.route`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(logit_TE, rule, tile)
    (T, E), K = logit_TE.shape, rule.choices
    spec = Spec(
        T=T,
        E=E,
        K=K,
        tile=tile,
        tiles=tiles_of(T, K, E, tile),
        weighing=WEIGHINGS[rule.score, rule.weigh],
        scale=float(rule.scale),
        corrected=correction_E is not None,
        interpret=interpret,
    )
    given = (logit_TE,) if correction_E is None else (logit_TE, correction_E)
    *groups, weight = _route(spec, given)
    expert_W, rows_W, used, token_P, place = groups
    return Groups(expert_W, rows_W, used, token_P, place.reshape(T, K)), weight.reshape(T, K)


def _route(spec: Spec, given: tuple[Array, ...]) -> tuple[Array, ...]:
    """Expert and rows of each tile, their number, token of each row, row and weight of each
    choice."""
    fours = -(-spec.T // lanes.WARPS)  # of tokens
    warpgroups = min(fours, MOST_WARPGROUPS)

    def route_tokens(*refs: Any, **sm: Any) -> None:
        logits, *correction = refs[: len(given)]
        expert_W, rows_W, used, token_P, place_TK, weight_TK = refs[len(given) :]
        wg = lax.axis_index("wg")
        first = pl.when(wg == 0)
        first(lambda: _do(spec, lanes.clear, sm["bits"], token_P))

        @pl.loop(0, lax.div(fours - wg + warpgroups - 1, jnp.int32(warpgroups)))
        def _(i):  # type: ignore[no-untyped-def]
            four = wg + i * warpgroups
            store(sm["chosen"].at[four], _chosen(spec, logits, correction, four))

        plgpu.barrier_arrive(sm["done"])
        plgpu.barrier_wait(sm["done"])

        @first
        def _() -> None:
            chosen, bits, begin = sm["chosen"], sm["bits"], sm["begin"]
            _do(spec, lanes.mark, chosen, bits)
            _do(spec, lanes.lay_out, bits, begin, expert_W, rows_W, used)
            _do(spec, lanes.place, chosen, bits, begin, place_TK, weight_TK, token_P)

    rows, pairs, words = spec.tiles * spec.tile, spec.T * spec.K, spec.E * spec.words
    integers = [(spec.tiles,), (spec.tiles,), (1,), (rows,), (pairs,)]
    return launch(  # type: ignore[no-any-return]
        route_tokens,
        given,
        spec.interpret,
        out_type=(
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
            jax.ShapeDtypeStruct((pairs,), jnp.float32),
        ),
        scratch_types={
            "chosen": plgpu.SMEM((fours, LANES, 2), jnp.int32),
            "bits": plgpu.SMEM((words,), jnp.int32),
            "begin": plgpu.SMEM((words,), jnp.int32),
            "done": plgpu.Barrier(num_arrivals=warpgroups),
        },
        grid=(1,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
    )


def _chosen(spec: Spec, logits: Any, correction: list[Any], four: Array) -> Array:
    """Experts and weights of four tokens, as registers of the lanes."""

    def program(m: Machine, refs: list[Any], scalars: list[Any], _: list[Any]) -> list[Any]:
        token = m.add(m.times(m.constant(lanes.WARPS), scalars[0]), m.warp)
        return lanes.choose(m, spec, refs[0], refs[1] if spec.corrected else None, token)

    words = (logits, *correction)
    return run(program, spec.interpret, 2, scalars=(four,), words=words)  # type: ignore[no-any-return]


def _do(spec: Spec, program: Callable[..., None], *words: Any) -> None:
    """Runs a program over these arrays, and waits until all lanes are done."""

    def written(m: Machine, refs: list[Any], *_: Any) -> list[Any]:
        program(m, spec, *refs)
        return []

    run(written, spec.interpret, 0, words=words)
    sync(spec.interpret)
