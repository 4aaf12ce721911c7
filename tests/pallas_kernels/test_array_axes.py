"""Arrays of attention ops have the axes that their names promise, in every back end and plan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode, paged_extend, rope_write
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as hopper_decode
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.paged_extend import mosaic_gpu as hopper_extend
from pallas_kernels.quantised import SCALE_DTYPE
from tests.array_shapes import checked
from tests.pallas_kernels.test_rope_write import CASES as WRITES
from tests.pallas_kernels.test_rope_write import arguments

# Sizes that differ from each other, so that no two letters are equal by chance
DECODE = decode_cases.Case(
    name="axes", lengths=(5, 0, 130, 64, 3), heads=12, kv_heads=2, head_dim=128, page_size=64
)
EXTEND = extend_cases.Case(
    name="axes", rows=((70, 9), (0, 0), (3, 30)), gap=2, heads=12, kv_heads=2, head_dim=128,
    page_size=64,
)  # fmt: skip
MODULES = tuple(
    f"pallas_kernels.{name}" for name in ("items", "tiles", "xla", "paged_decode", "paged_extend")
)
backends = pytest.mark.parametrize("backend", ["reference", "xla", "mosaic_tpu"])


def low(given: Any) -> list[jax.Array]:
    return [jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else None) for a in given.args]


@backends
@pytest.mark.parametrize("window", [None, 40])
def test_decode_keeps_its_promises(backend: str, window: int | None) -> None:
    op = functools.partial(
        paged_decode.decode_attention, backend=backend, scale=0.1, window=window, softcap=3.0
    )
    sinks = jnp.zeros((DECODE.heads,))
    with checked(*MODULES) as seen:
        out = jax.eval_shape(op, *low(decode_cases.inputs(DECODE)), sinks=sinks)
    assert out.shape == (5, 12, 128) and out.dtype == jnp.bfloat16
    assert {"q_BNH", "page_table_BM", "lengths_B"} <= set(seen)


@backends
@pytest.mark.parametrize("window", [None, 40])
def test_extend_keeps_its_promises(backend: str, window: int | None) -> None:
    op = functools.partial(
        paged_extend.extend_attention, backend=backend, scale=0.1, window=window, softcap=3.0
    )
    args = low(extend_cases.inputs(EXTEND))
    with checked(*MODULES) as seen:
        out = jax.eval_shape(op, *args, sinks=jnp.zeros((EXTEND.heads,)))
    assert out.shape == args[0].shape
    assert {"q_TNH", "page_table_RM", "starts_R", "lengths_R", "kv_lengths_R"} <= set(seen)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_8_bit_pages_keep_them_too(op: str, backend: str) -> None:
    attend, args = (
        (paged_decode.decode_attention, low(decode_cases.inputs(DECODE)))
        if op == "decode"
        else (paged_extend.extend_attention, low(extend_cases.inputs(EXTEND)))
    )
    q, k, v, *rest = args
    pools = [x.astype(jnp.float8_e4m3fn) for x in (k, v)]
    scales = jnp.ones((*k.shape[:2], 2, k.shape[2]), SCALE_DTYPE)
    with checked(*MODULES) as seen:
        run = functools.partial(attend, backend=backend, scale=0.1)
        out = jax.eval_shape(run, q, *pools, *rest, scales=scales)
    assert out.shape == q.shape and seen["q_BNH" if op == "decode" else "q_TNH"] > 0


@pytest.mark.parametrize("no_split", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_plans_keep_their_promises(window: int | None, no_split: bool) -> None:
    decode, extend = (low(x.inputs(case)) for x, case in (
        (decode_cases, DECODE), (extend_cases, EXTEND),
    ))  # fmt: skip
    how: dict[str, Any] = {"head_dim": 128, "window": window, "no_split": no_split}
    how |= {"heads": 12, "kv_heads": 2}
    tuning = hopper_decode.Tuning(cluster=1)
    with checked(*MODULES) as seen:
        jax.eval_shape(functools.partial(hopper_decode.plan, tuning=tuning, **how), decode[4])
        how["tokens"] = len(extend[0])
        jax.eval_shape(functools.partial(hopper_extend.plan, **how), *extend[4:])
    assert {"rows_B4", "split_S", "low_S", "lengths_B", "starts_R", "line_I", "item_I"} <= set(seen)


@pytest.mark.parametrize("variant", ["flags", "clusters", "extend"])
def test_the_hopper_kernels_keep_their_promises(variant: str) -> None:
    if variant == "extend":
        op: Any = functools.partial(hopper_extend.extend_attention, scale=0.1)
        args = low(extend_cases.inputs(EXTEND))
    else:
        tuning = hopper_decode.Tuning(cluster=8 if variant == "clusters" else 0, swapped=True)
        op = functools.partial(hopper_decode.decode_attention, scale=0.1, tuning=tuning)
        args = low(decode_cases.inputs(DECODE))
    with checked("pallas_kernels.paged_decode", "pallas_kernels.paged_extend") as seen:
        out = jax.eval_shape(op, *args)
    assert out.shape == args[0].shape
    assert sum(seen.values()) > 10


@pytest.mark.parametrize("case", WRITES, ids=lambda case: case.name)
def test_rotation_and_write_keep_their_promises(case: Any) -> None:
    given = arguments(case)
    with checked("pallas_kernels.rope_write") as seen:
        out = jax.eval_shape(functools.partial(rope_write.rope_write, backend="reference"), *given)
    assert [x.shape for x in out[1:]] == [given[1].shape, given[2].shape]
    assert {"q_TNH", "page_T", "offset_T", "k_TKH"} <= set(seen)
