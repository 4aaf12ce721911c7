"""Names of arrays in the ops promise axes (`x_TD`): they hold while every back end is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import items, quantised
from pallas_kernels.add_norm import add_norm
from pallas_kernels.draw import draw
from pallas_kernels.draw.cases import OPTIONS, logits, rows_of
from pallas_kernels.gated_matmul import SILU, gated_matmul
from pallas_kernels.gated_matmul import mosaic_gpu as product
from pallas_kernels.grouped_matmul import combine, group_tokens, grouped_matmul
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import decode_attention
from pallas_kernels.paged_extend import cases as extend_cases
from pallas_kernels.paged_extend import extend_attention
from pallas_kernels.route import Rule, route
from tests.array_shapes import checked

low = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def traced(run: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, int]:
    """Trace a call without running it; the names that were checked, and how often."""
    with checked("pallas_kernels") as seen:
        jax.eval_shape(functools.partial(run, **options), *arguments)
    return seen


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
def test_the_residual_sum_and_norm(backend: str) -> None:
    x = low((3, 128))
    seen = traced(add_norm, x, x, low((128,)), eps=1e-6, backend=backend)
    assert seen["x_TD"] and seen["delta_TD"] and seen["weight_D"]


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
def test_the_gated_product(backend: str) -> None:
    seen = traced(gated_matmul, low((9, 64)), low((32, 64)), gating=SILU, backend=backend)
    assert seen["x_MI"] and seen["w_OI"]


def routed(backend: str, x: Any, gate_up: Any, down: Any, expert: Any, weight: Any) -> Any:
    groups = group_tokens(expert, gate_up.shape[0], 8)
    hidden = grouped_matmul(
        x[groups.token_P], gate_up, groups, gating=lambda gate, up: gate * up, backend=backend
    )
    return combine(grouped_matmul(hidden, down, groups, backend=backend), groups, weight)


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
def test_a_routed_feed_forward(backend: str) -> None:
    arrays = low((9, 128)), low((4, 256, 128)), low((4, 128, 128))
    chosen = jax.ShapeDtypeStruct((9, 2), jnp.int32), jax.ShapeDtypeStruct((9, 2), jnp.float32)
    seen = traced(functools.partial(routed, backend), *arrays, *chosen)
    names = {"expert_TK", "rank_TK", "earlier_QN", "place_TK", "token_P", "x_PI", "w_EOI", "y_PD"}
    assert names <= seen.keys()


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
def test_routing(backend: str, tokens: int) -> None:
    logit, correction = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((tokens, 32), (32,)))
    run = functools.partial(route, rule=Rule(4), backend=backend)
    seen = traced(run, logit, correction)
    assert {"logit_TE", "correction_E"} <= seen.keys()


@pytest.mark.parametrize("backend", ["reference", "mosaic_gpu"])
def test_the_draw(backend: str) -> None:
    options = list(OPTIONS.values())[:5]
    given = logits("flat", 5, 1152)
    seen = traced(draw, given, rows_of(options, given), backend=backend)
    names = {"logits_BV", "temperature_B", "top_k_B", "top_p_B", "min_p_B", "key_B2", "banned_BK"}
    assert names <= seen.keys()


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_attention_over_pages(op: str, backend: str) -> None:
    table, run = {
        "decode": (decode_cases, decode_attention),
        "extend": (extend_cases, extend_attention),
    }[op]
    case = next(case for case in table.CASES if case.name == "ragged" or "ragged" in case.name)
    given = table.inputs(case)
    seen = traced(run, *given.args, **case.options, backend=backend)
    assert sum(seen.values()) >= 3


def test_items_of_a_ragged_step() -> None:
    rows = [jax.ShapeDtypeStruct((4,), jnp.int32)] * 3

    def there_and_back(q: Any, *rows: Any) -> Any:
        chunks = items.chunk_items(*rows, 24, 8)
        return items.unpack_chunks(items.pack_chunks(q, chunks, 2), chunks)

    seen = traced(there_and_back, low((24, 6, 16)), *rows)
    assert {"starts_R", "lengths_R", "item_W", "token_WQ", "place_T"} <= seen.keys()
    seen = traced(items.pack_decode, low((3, 6, 16)), kv_heads=2, multiple=8)
    assert seen["q_BNH"] == 1


def test_a_wrong_axis_is_noticed_in_the_kernels_too() -> None:
    """The check itself can fail: a key of three words is no `key_B2`."""
    given = logits("flat", 2, 1152)
    rows = rows_of([OPTIONS["plain"]] * 2, given)
    wrong = dataclasses.replace(rows, key_B2=np.zeros((2, 3), np.uint32))
    with pytest.raises(AssertionError, match="key_B2 has 2 = 3"):
        traced(draw, given, wrong, backend="mosaic_gpu")


def test_the_kernels_wrappers_name_their_arrays_by_shape() -> None:
    seen = traced(product.gated_matmul, low((9, 64)), low((32, 64)), gating=SILU)
    assert seen["x_MI"] and seen["w_OI"]
    heads = jax.ShapeDtypeStruct((3, 2, 16), jnp.float32)
    assert traced(quantised.quantise, heads, dtype=quantised.DTYPES[0]) is not None
