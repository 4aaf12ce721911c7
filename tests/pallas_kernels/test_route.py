"""Routing on Hopper: the kernel in the interpreter and on a card, and its assembly run line by
line, against the reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.lanes import LANES
from pallas_kernels.route import BACKENDS, GroupLimit, Rule, mosaic_gpu, reference, unchanged
from pallas_kernels.route import mosaic_lanes as lanes
from pallas_kernels.route.cases import CASES, Case, inputs
from tests.pallas_kernels.assembly import Assembly
from tests.pallas_kernels.places import INTERPRETER, card, launch_options, places

BY_NAME = {case.name: case for case in CASES}
WEIGHTS = 4e-6  # relative: two functions of a card in float32


def expected(case: Case) -> tuple[Groups, jax.Array]:
    logits, correction = inputs(case)
    return jax.jit(reference.route, static_argnums=2)(logits, correction, case.rule)


def check(case: Case, groups: Groups, weight: Any) -> None:
    wanted, wanted_weight = expected(case)
    used = int(wanted.used[-1])
    assert int(groups.used[-1]) == used
    np.testing.assert_array_equal(groups.expert_W[:used], wanted.expert_W[:used])
    np.testing.assert_array_equal(groups.rows_W, wanted.rows_W)
    np.testing.assert_array_equal(groups.place_TK, wanted.place_TK)
    assert (groups.token_P is None) == (wanted.token_P is None)
    if wanted.token_P is not None:
        np.testing.assert_array_equal(groups.token_P, wanted.token_P)
    np.testing.assert_allclose(weight, wanted_weight, rtol=WEIGHTS)


@places
@pytest.mark.parametrize(
    "name",
    [
        "one token, corrected",
        "shared tiles",
        pytest.param("sorted", marks=pytest.mark.slow),
        # More tokens than a block has warps
        pytest.param("two words of bits", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_routes_as_the_reference(name: str, place: str) -> None:
    run_case(BY_NAME[name], place)


@pytest.mark.parametrize("place", [card])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_kernel_routes_every_case_on_a_card(name: str, place: str) -> None:
    run_case(BY_NAME[name], place)


@pytest.mark.parametrize(
    ("grouped", "name"),
    [
        pytest.param(3, "shared tiles", id="by XLA"),
        pytest.param(256, "sorted", id="by a block", marks=pytest.mark.slow),
    ],
)
def test_many_tokens_choose_in_blocks_of_their_own(
    grouped: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu, "MOST_TOGETHER", 3)
    monkeypatch.setattr(mosaic_gpu, "MOST_GROUPED", grouped)
    run_case(BY_NAME[name], INTERPRETER)


def run_case(case: Case, place: str) -> None:
    logits, correction = inputs(case)
    call = jax.jit(lambda *given: mosaic_gpu.route(*given, case.rule, **launch_options(place)))
    check(case, *call(logits, correction))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if case.tokens == 256 else [])
        for name, case in BY_NAME.items()
        if case.tokens <= mosaic_gpu.MOST_GROUPED
    ],
)
def test_the_assembly_routes_as_the_reference(name: str) -> None:
    case = BY_NAME[name]
    check(case, *assembled(case))


def assembled(case: Case) -> tuple[Groups, np.ndarray]:
    """Routes by the text of the lane programs; every array begins with values that do not fit."""
    logits, correction = inputs(case)
    spec = mosaic_gpu.spec_of(case.tokens, case.experts, case.rule)
    scores = [x for x in (logits, correction) if x is not None]
    fours = -(-spec.T // lanes.WARPS)

    def stale(*shape: int, dtype: Any = np.int32) -> np.ndarray:
        return np.full(shape, 2**30 - 1).astype(dtype)

    def do(program: Any, *arrays: np.ndarray, near: int = 0) -> None:
        far = range(near, len(arrays))
        Assembly(arrays, far).run(lambda m, given: program(m, spec, *given) or [])

    weight = stale(spec.T, spec.K, dtype=np.float32)
    if spec.T == 1:
        expert = stale(1, spec.K)
        do(lanes.choose_one, *scores, expert, weight)
        return mosaic_gpu.share_tokens(jnp.asarray(expert), spec.E), weight
    chosen, bits, begin = (
        stale(fours, LANES, 2),
        stale(spec.E, spec.words),
        stale(spec.E, spec.words),
    )
    expert_W, rows_W, used = stale(spec.tiles), stale(spec.tiles), stale(1)
    place_TK = stale(spec.T, spec.K)
    token_P = [] if spec.shared else [stale(spec.rows)]
    do(lanes.clear, bits, *token_P, near=1)
    for four in range(fours):
        registers = Assembly(scores, range(len(scores))).run(
            lambda m, given: lanes.choose(
                m,
                spec,
                given[0],
                given[1 : len(scores)],
                m.add(m.times(m.constant(lanes.WARPS), given[len(scores)]), m.warp),
            ),
            [four],
        )
        chosen[four] = np.stack(registers, axis=1)
    do(lanes.mark, chosen, bits, near=2)
    do(lanes.lay_out, bits, begin, expert_W, rows_W, used, near=2)
    do(lanes.place, chosen, bits, begin, place_TK, weight, *token_P, near=3)
    given = (expert_W, rows_W, used, token_P[0] if token_P else None, place_TK)
    return Groups(*given), weight


@pytest.mark.parametrize(
    ("shape", "dtype", "rule", "reason"),
    [
        ((0, 8), "float32", Rule(2), "of tokens"),
        ((1, 257), "float32", Rule(2), "1 to 256 experts"),
        ((4, 8), "bfloat16", Rule(2), "float32 logits"),
        ((4, 32), "float32", Rule(17), "1 to 16 choices"),
        ((4, 8), "float32", Rule(2, limit=GroupLimit(2, 1, 1)), "without a limit"),
        ((4, 8), "float32", Rule(2, score=unchanged), "softmax or sigmoid"),
    ],
)
def test_what_the_kernel_does_not_route_is_refused(
    shape: tuple[int, int], dtype: str, rule: Rule, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        mosaic_gpu.check(jnp.zeros(shape, dtype), rule)
    assert not BACKENDS.supports("mosaic_gpu", jnp.zeros(shape, dtype), rule)
