"""Flags of the attention kernels' plans: a call writes a buffer that it aliases, never an input of
the caller."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as hopper_decode
from pallas_kernels.paged_decode.plan import SPLIT_FIELDS, DecodePlan
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.paged_extend import mosaic_gpu as hopper_extend
from pallas_kernels.paged_extend.plan import SPLIT_FIELDS as EXTEND_FIELDS
from pallas_kernels.quantised import SCALE_DTYPE

DECODE = decode_cases.Case(
    name="decode", lengths=(300, 0, 70, 5), heads=4, kv_heads=2, page_size=64
)
EXTEND = extend_cases.Case(
    name="extend", rows=((200, 5), (3, 3)), heads=4, kv_heads=2, page_size=64
)
VARIANTS = {
    "decode": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1),
    "clusters of 1": hopper_decode.Tuning(stages=2, blocks=6, min_tiles=1, cluster=1),
    "clusters of 2, keys for rows": hopper_decode.Tuning(
        stages=2, blocks=12, min_tiles=1, cluster=2, swapped=True
    ),
    "extend": hopper_extend.Tuning(groups=1, stages=2, blocks=4, min_tiles=1),
}
interpreted = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def low(given: Any) -> list[jax.Array]:
    """The arguments of a case in bfloat16."""
    return [jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else None) for a in given.args]


def call_of(variant: str) -> tuple[Any, list[jax.Array], Any]:
    """The op with its options bound, its arguments, and a plan of them."""
    tuning: Any = VARIANTS[variant]
    if variant == "extend":
        args = low(extend_cases.inputs(EXTEND))
        op = functools.partial(hopper_extend.extend_attention, tuning=tuning, **EXTEND.options)
        plan: Any = hopper_extend.plan(
            *args[4:], tokens=len(args[0]), heads=4, kv_heads=2, head_dim=64, tuning=tuning
        )
        return op, args, plan
    args = low(decode_cases.inputs(DECODE))
    op = functools.partial(hopper_decode.decode_attention, tuning=tuning, **DECODE.options)
    return (
        op,
        args,
        hopper_decode.plan(args[4], heads=DECODE.heads, kv_heads=2, head_dim=64, tuning=tuning),
    )


def assert_same_bytes(before: Any, after: Any) -> None:
    """NaN included."""
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def aliased_types(text: str) -> list[str]:
    """The type of each operand of the kernels that is aliased to an output."""
    found = []
    for line in text.splitlines():
        if "mosaic_gpu_v2" in line:
            types = re.findall(r"tensor<[^>]*>", line.rsplit(" : (", 1)[1].split(") -> ")[0])
            found += [types[int(i)] for i in re.findall(r"operand_index = (\d+)", line)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lowered_call_aliases_the_buffer_of_flags_and_nothing_else(variant: str) -> None:
    op, args, plan = call_of(variant)
    text = jax.jit(op).trace(*args, plan=plan).lower(lowering_platforms=("cuda",)).as_text()
    rows, columns = plan.splits_SF.shape
    assert aliased_types(text) == [f"tensor<{rows}x{columns}xi32>"]


def test_the_call_over_8_bit_pages_aliases_it_too() -> None:
    pool = jax.ShapeDtypeStruct((8, 2, 64, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((8, 2, 2, 64), SCALE_DTYPE)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 2), (3,))]
    q = jax.ShapeDtypeStruct((3, 4, 64), jnp.bfloat16)
    op = functools.partial(hopper_decode.decode_attention, scale=0.1)
    traced = jax.jit(op).trace(q, pool, pool, *ints, scales=scales)
    found = aliased_types(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(found) == 1 and found[0].endswith(f"x{SPLIT_FIELDS + 2}xi32>")


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_with_one_open_plan_hand_its_buffer_on(variant: str) -> None:
    op, args, plan = call_of(variant)

    def layers(plan: Any, *args: jax.Array) -> tuple[list[jax.Array], Any]:
        opened = open_plan(plan)
        return [op(*args, plan=opened) for _ in range(3)], close_plan(opened)

    text = jax.jit(layers).trace(plan, *args).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu_v2" in line]
    assert len(calls) == 3
    for before, after in itertools.pairwise(calls):
        name = before.strip().split(":")[0]
        operands = re.search(r"@mosaic_gpu_v2\((.*?)\)", after)
        index = re.search(r"operand_index = (\d+)", after)
        assert operands and index
        assert operands.group(1).split(", ")[int(index.group(1))].startswith(f"{name}#")


@interpreted
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in ("decode", "extend") else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_a_call_changes_none_of_its_inputs(variant: str) -> None:
    op, args, plan = call_of(variant)
    before = jax.tree.map(np.array, (args, plan))
    run = jax.jit(functools.partial(op, interpret=plgpu.InterpretGPUParams()))
    assert np.abs(np.asarray(run(*args, plan=plan), np.float32)).max() > 0
    assert_same_bytes(before, (args, plan))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_the_card_a_call_changes_none_of_its_inputs_and_lowers_its_flags(variant: str) -> None:
    op, args, plan = call_of(variant)
    before = jax.tree.map(np.array, (args, plan))

    @jax.jit
    def chained(plan: Any, *args: jax.Array) -> tuple[list[jax.Array], Any]:
        opened = open_plan(plan)
        return [op(*args, plan=opened) for _ in range(24)], close_plan(opened)

    for _ in range(3):
        outs, closed = chained(plan, *args)
        fields = EXTEND_FIELDS if variant == "extend" else SPLIT_FIELDS
        assert not np.asarray(closed.splits_SF)[:, fields:].any(), "flags are zero after the calls"
        np.testing.assert_array_equal(closed.splits_SF, plan.splits_SF)
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])
    assert_same_bytes(before, (args, plan))


def test_an_open_plan_closes_to_what_it_was() -> None:
    plan = DecodePlan(jnp.ones((2, 4), jnp.int32), jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    closed = jax.jit(lambda plan: close_plan(open_plan(plan)))(plan)
    jax.tree.map(np.testing.assert_array_equal, closed, plan)


def test_plans_without_flags_are_opened_and_closed_as_they_are() -> None:
    assert open_plan(None) is None and close_plan(None) is None
    other = {"order": np.arange(3)}
    assert open_plan(other) is other and close_plan(other) is other


def test_writes_by_an_open_plan_are_in_the_closed_plan_and_not_in_the_given_one() -> None:
    plan = DecodePlan(jnp.zeros((2, 4), jnp.int32), jnp.zeros((3, 5), jnp.int32))

    def write(plan: DecodePlan) -> DecodePlan:
        opened = open_plan(plan)
        opened.splits_SF[1, 4] = jnp.int32(7)
        return close_plan(opened)

    closed = jax.jit(write)(plan)
    assert int(closed.splits_SF[1, 4]) == 7 and int(closed.splits_SF.sum()) == 7
    assert not np.asarray(plan.splits_SF).any()
