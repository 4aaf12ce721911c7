"""Routing for NVIDIA Hopper: a warp chooses a token's experts, a block counts the tokens of each.

Few tokens do both in one launch. More choose in blocks of their own first, since one processor
would take longer than a launch costs. Those of long prompts are grouped by XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.groups import (
    MOST_SHARED,
    Groups,
    group,
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

MOST_EXPERTS = 256
MOST_CHOICES = 16
# tokens of one launch, and of a block that groups
MOST_TOGETHER = 64
MOST_GROUPED = 256
MOST_WARPGROUPS = 8  # as many as a block may have; each token more of a warp takes as long again
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
    if logit_TE.dtype != jnp.float32 or E > MOST_EXPERTS or not T * E:
        raise ValueError(
            f"mosaic_gpu route takes float32 logits of tokens and 1 to {MOST_EXPERTS} experts, "
            f"got {logit_TE.dtype}{list(logit_TE.shape)}"
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
    arrays = (logit_TE,) if correction_E is None else (logit_TE, correction_E)
    if T == 1:
        expert_K, weight_K = _choose(spec, arrays)
        return share_tokens(expert_K[None], E), weight_K[None]
    if T > MOST_GROUPED:
        register_TK2 = _choose_apart(spec, arrays).reshape(-1, lanes.WARP, 2)[:T, : spec.K]
        weight_TK = lax.bitcast_convert_type(register_TK2[:, :, 1], jnp.float32)
        return group(register_TK2[:, :, 0], E), weight_TK
    if T > MOST_TOGETHER:
        made = _group_apart(spec, _choose_apart(spec, arrays))
    else:
        made = _choose_and_group(spec, arrays)
    expert_W, rows_W, used, place, *token_P, weight = made
    place_TK, weight_TK = (x.reshape(T, spec.K) for x in (place, weight))
    token = None
    if token_P:
        token = token_P[0]
    return Groups(expert_W, rows_W, used, token, place_TK), weight_TK


def spec_of(T: int, E: int, rule: Rule, interpret: Any = None) -> Spec:
    """The kernel's parameters for logits `[T, E]`; groups are those of `grouped_matmul.group`."""
    K = rule.choices
    shared = T <= MOST_SHARED
    if shared:
        tile = shared_tile(T)
    else:
        tile = tile_for(T, K, E)
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


def _choose(spec: Spec, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Experts and weights of one token."""

    def choose_experts(*refs: Any) -> None:
        _do(spec, lanes.choose_one, *refs)

    return _launch(spec, choose_experts, arrays, [_integers(spec.K), _weights(spec)])  # type: ignore[no-any-return]


def _choose_apart(spec: Spec, arrays: tuple[Array, ...]) -> Array:
    """Experts and weights of all tokens as `choose` leaves them, four a block."""

    def choose_experts(*refs: Any) -> None:
        *scores, chosen = refs
        four = lax.axis_index("block")
        store(chosen.at[four], _chosen(spec, tuple(scores), four))

    shape = _integers(spec.fours, LANES, 2)
    return _launch(spec, choose_experts, arrays, shape, blocks=spec.fours)  # type: ignore[no-any-return]


def _group_apart(spec: Spec, chosen: Array) -> tuple[Array, ...]:
    """What `_groups` says, of choices that were made."""

    def group_tokens(chosen: Any, *made: Any, bits: Any, begin: Any) -> None:
        _do(spec, lanes.clear, bits, *made[4:-1])
        _count(spec, chosen, bits, begin, made)

    return _launch(spec, group_tokens, (chosen,), _groups(spec), _bits(spec))  # type: ignore[no-any-return]


def _choose_and_group(spec: Spec, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """What `_groups` says, of logits."""
    warpgroups = min(spec.fours, MOST_WARPGROUPS)

    def route_tokens(*refs: Any, chosen: Any, bits: Any, begin: Any, done: Any) -> None:
        scores = refs[: len(arrays)]
        made = refs[len(arrays) :]
        wg = lax.axis_index("wg")
        pl.when(wg == 0)(lambda: _do(spec, lanes.clear, bits, *made[4:-1]))

        @pl.loop(0, lax.div(spec.fours - wg + warpgroups - 1, jnp.int32(warpgroups)))
        def _(i):  # type: ignore[no-untyped-def]
            four = wg + i * warpgroups
            store(chosen.at[four], _chosen(spec, scores, four))

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        pl.when(wg == 0)(lambda: _count(spec, chosen, bits, begin, made))

    scratch = _bits(spec) | {
        "chosen": plgpu.SMEM((spec.fours, LANES, 2), jnp.int32),
        "done": plgpu.Barrier(num_arrivals=warpgroups),
    }
    return _launch(  # type: ignore[no-any-return]
        spec, route_tokens, arrays, _groups(spec), scratch, warpgroups=warpgroups
    )


def _count(spec: Spec, chosen: Any, bits: Any, begin: Any, made: tuple[Any, ...]) -> None:
    """Groups the tokens, whose bits are cleared, by what they chose."""
    expert_W, rows_W, used, rows, *token_P, weights = made
    _do(spec, lanes.mark, chosen, bits)
    _do(spec, lanes.lay_out, bits, begin, expert_W, rows_W, used)
    _do(spec, lanes.place, chosen, bits, begin, rows, weights, *token_P)


def _groups(spec: Spec) -> list[jax.ShapeDtypeStruct]:
    """Expert and rows of each tile, their number, the row of each choice, where tiles differ the
    token of each row, and the weights of all choices."""
    tiles = _integers(spec.tiles)
    choices = _integers(spec.T * spec.K)
    if not spec.shared:
        rows = [_integers(spec.rows)]
    else:
        rows = []
    return [tiles, tiles, _integers(1), choices, *rows, _weights(spec)]


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _weights(spec: Spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((spec.T * spec.K,), jnp.float32)


def _bits(spec: Spec) -> dict[str, Any]:
    """Scratch of a block that groups."""
    words = plgpu.SMEM((spec.E * spec.words,), jnp.int32)
    return {"bits": words, "begin": words}


def _launch(
    spec: Spec,
    kernel: Callable[..., None],
    arrays: tuple[Array, ...],
    made: Any,
    scratch: dict[str, Any] | None = None,
    *,
    blocks: int = 1,
    warpgroups: int = 1,
) -> Any:
    """The outputs `made` of a kernel."""
    return launch(
        kernel,
        arrays,
        spec.interpret,
        out_type=tuple(made) if isinstance(made, list) else made,
        scratch_types=scratch or {},
        grid=(blocks,),
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
