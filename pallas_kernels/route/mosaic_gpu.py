"""Routing for NVIDIA Hopper in one small launch: a warp a token, then the tokens of each expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import (
    MOST_SHARED,
    Groups,
    share_tokens,
    shared_tile,
    tile_for,
    tiles_of,
)
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


def check(logit_TE: Array, rule: Rule) -> None:
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


def route(
    logit_TE: Array, correction_E: Array | None, rule: Rule, *, interpret: Any = None
) -> tuple[Groups, Array]:
    """See `pallas_kernels.route`. Raises what `check` raises.

    `interpret` is a `plgpu.InterpretGPUParams` for machines without a GPU.
    """
    check(logit_TE, rule)
    T, E = logit_TE.shape
    spec = spec_of(T, E, rule, interpret)
    given = (logit_TE,) if correction_E is None else (logit_TE, correction_E)
    if T == 1:
        expert_K, weight_K = _choose(spec, given)
        return share_tokens(expert_K[None], E), weight_K[None]
    expert_W, rows_W, used, place, *token_P, weight = _group(spec, given)
    groups = Groups(
        expert_W, rows_W, used, token_P[0] if token_P else None, place.reshape(T, spec.K)
    )
    return groups, weight.reshape(T, spec.K)


def spec_of(T: int, E: int, rule: Rule, interpret: Any = None) -> Spec:
    """The kernel's parameters for logits `[T, E]`; groups are those of `grouped_matmul.group`."""
    K, shared = rule.choices, T <= MOST_SHARED
    tile = shared_tile(T) if shared else tile_for(T, K, E)
    return Spec(
        T=T,
        E=E,
        K=K,
        shared=shared,
        tile=tile,
        tiles=min(E, T * K) if shared else tiles_of(T, K, E, tile),
        weighing=WEIGHINGS[rule.score, rule.weigh],
        scale=float(rule.scale),
        interpret=interpret,
    )


def _choose(spec: Spec, given: tuple[Array, ...]) -> tuple[Array, ...]:
    """Experts and weights of one token."""

    def choose_experts(*refs: Any) -> None:
        _do(spec, lanes.choose_one, *refs)

    return _launch(spec, choose_experts, given, [(spec.K,)])


def _group(spec: Spec, given: tuple[Array, ...]) -> tuple[Array, ...]:
    """Expert and rows of each tile, their number, the row of each choice, where tiles differ the
    token of each row, and the weights of all choices."""
    fours = -(-spec.T // lanes.WARPS)  # of tokens
    warpgroups = min(fours, MOST_WARPGROUPS)

    def route_tokens(*refs: Any, chosen: Any, bits: Any, begin: Any, done: Any) -> None:
        scores = refs[: len(given)]
        expert_W, rows_W, used, rows, *token_P, weights = refs[len(given) :]
        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: _do(spec, lanes.clear, bits, *token_P))

        @pl.loop(0, lax.div(fours - wg + warpgroups - 1, jnp.int32(warpgroups)))
        def _(i):  # type: ignore[no-untyped-def]
            four = wg + i * warpgroups
            store(chosen.at[four], _chosen(spec, scores, four))

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

        @pl.when(wg == 0)
        def _() -> None:
            _do(spec, lanes.mark, chosen, bits)
            _do(spec, lanes.lay_out, bits, begin, expert_W, rows_W, used)
            _do(spec, lanes.place, chosen, bits, begin, rows, weights, *token_P)

    words = spec.E * spec.words
    scratch = {
        "chosen": plgpu.SMEM((fours, LANES, 2), jnp.int32),
        "bits": plgpu.SMEM((words,), jnp.int32),
        "begin": plgpu.SMEM((words,), jnp.int32),
        "done": plgpu.Barrier(num_arrivals=warpgroups),
    }
    shapes = [(spec.tiles,), (spec.tiles,), (1,), (spec.T * spec.K,)]
    shapes += [] if spec.shared else [(spec.rows,)]
    return _launch(spec, route_tokens, given, shapes, scratch, warpgroups)


def _launch(
    spec: Spec,
    kernel: Callable[..., None],
    given: tuple[Array, ...],
    integers: Sequence[tuple[int, ...]],
    scratch: dict[str, Any] | None = None,
    warpgroups: int = 1,
) -> tuple[Array, ...]:
    """Arrays of integers of these shapes, and the weights of all choices."""
    return launch(  # type: ignore[no-any-return]
        kernel,
        given,
        spec.interpret,
        out_type=(
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
            jax.ShapeDtypeStruct((spec.T * spec.K,), jnp.float32),
        ),
        scratch_types=scratch or {},
        grid=(1,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
    )


def _chosen(spec: Spec, scores: tuple[Any, ...], four: Array) -> Array:
    """Experts and weights of four tokens, as registers of the lanes."""

    def program(m: Machine, refs: list[Any], scalars: list[Any], _: list[Any]) -> list[Any]:
        token = m.add(m.times(m.constant(lanes.WARPS), scalars[0]), m.warp)
        return lanes.choose(m, spec, refs[0], refs[1:], token)

    return run(program, spec.interpret, 2, scalars=(four,), words=scores)  # type: ignore[no-any-return]


def _do(spec: Spec, program: Callable[..., None], *words: Any) -> None:
    """Runs a program over these arrays, and waits until all lanes are done."""

    def written(m: Machine, refs: list[Any], *_: Any) -> list[Any]:
        program(m, spec, *refs)
        return []

    run(written, spec.interpret, 0, words=words)
    sync(spec.interpret)
