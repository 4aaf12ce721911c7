"""What the Hopper back ends of attention refuse, each by name, and that tuned sizes are there."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import paged_decode, paged_extend
from pallas_kernels.paged_decode import mosaic_gpu as hopper_decode
from pallas_kernels.paged_extend import mosaic_gpu as hopper_extend
from tests.pallas_kernels.places import jitted

OPS: dict[str, Any] = {"decode": hopper_decode, "extend": hopper_extend}
both = pytest.mark.parametrize("op", OPS)


def shapes(heads: int, kv_heads: int, dtype: str = "bfloat16", page: int = 64) -> tuple[Any, ...]:
    pool = jax.ShapeDtypeStruct((4, kv_heads, page, 64), jnp.dtype(dtype))
    return jax.ShapeDtypeStruct((3, heads, 64), jnp.bfloat16), pool, pool


@both
def test_groups_of_any_size_are_taken_and_others_refused_with_both_numbers(op: str) -> None:
    package = {"decode": paged_decode, "extend": paged_extend}[op]
    for heads, kv_heads in ((1, 1), (28, 4), (17, 1), (64, 2), (71, 1)):
        OPS[op].check(*shapes(heads, kv_heads))
        assert package.BACKENDS.supports("mosaic_gpu", *shapes(heads, kv_heads))
    with pytest.raises(ValueError, match="a whole number of query heads a KV head, got 5 over 2"):
        OPS[op].check(*shapes(5, 2))
    assert not package.BACKENDS.supports("mosaic_gpu", *shapes(5, 2))


@both
@pytest.mark.parametrize(
    ("dtype", "page", "message"),
    [
        ("float32", 64, "bfloat16 or float16 throughout"),
        ("float16", 64, "got q bfloat16, k float16"),
        ("float8_e4m3fn", 16, "8-bit pages of 64 or 128 tokens, got 16"),
        ("bfloat16", 256, "16, 32, 64 or 128 tokens, got 256"),
        ("bfloat16", 8, "16, 32, 64 or 128 tokens, got 8"),
    ],
)
def test_pages_that_are_refused_are_named_with_the_op(
    op: str, dtype: str, page: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"mosaic_gpu {op} takes .*{message}"):
        OPS[op].check(*shapes(4, 2, dtype, page))


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_clusters_of_several_blocks_refuse_not_to_split(cluster: int) -> None:
    tuning = hopper_decode.Tuning(cluster=cluster)
    with pytest.raises(ValueError, match=f"clusters of {cluster} blocks.*take a cluster of 1"):
        hopper_decode.plan(
            jnp.ones((3,), jnp.int32),
            heads=4,
            kv_heads=2,
            head_dim=64,
            no_split=True,
            tuning=tuning,
        )


@pytest.mark.parametrize(
    ("dtype", "stages"), [("bfloat16", 2), ("float8_e4m3fn", 3), ("float8_e4m3fn", 5)]
)
def test_two_consumers_need_8_bit_pages_and_an_even_ring(dtype: str, stages: int) -> None:
    q, k, v = shapes(4, 2, dtype)
    more = {}
    if dtype != "bfloat16":
        more["scales"] = jax.ShapeDtypeStruct((4, 2, 2, 64), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 2), (3,))]
    tuning = hopper_decode.Tuning(stages=stages, consumers=2)
    with pytest.raises(ValueError, match=f"even number of stages; got {dtype} and {stages}"):
        jitted(hopper_decode.decode_attention).trace(
            q, k, v, *ints, scale=0.1, tuning=tuning, **more
        )


@both
@pytest.mark.parametrize(
    ("head_dim", "itemsize"), [(64, 1), (64, 2), (96, 2), (128, 1), (128, 2), (256, 1), (256, 2)]
)
def test_tuned_sizes_exist_for_every_head_dimension_and_page_type(
    op: str, head_dim: int, itemsize: int
) -> None:
    tuning = OPS[op].default_tuning(head_dim, itemsize)
    assert 1 <= tuning.blocks <= 132 and tuning.stages >= 1 and tuning.min_tiles >= 1


def test_tuned_cases_name_sizes_that_exist_and_rows_in_order() -> None:
    tuned = json.loads(hopper_decode.TUNED.read_text())
    for case in tuned["cases"] + tuned["cases, 8 bits"]:
        assert set(case["sizes"]) <= set(hopper_decode.Tuning._fields)
        assert set(case) == {"head_dim", "rows", "kv_heads", "sizes"}
        assert 1 <= case["rows"][0] <= case["rows"][1]
        cluster = case["sizes"].get("cluster", 0)
        assert cluster in (0, *hopper_decode.CLUSTERS_AT_ONCE) and cluster <= 8


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_rows_that_are_not_split_never_meet_tuned_clusters_of_several_blocks(
    kv_heads: int, itemsize: int
) -> None:
    for head_dim in (64, 128, 256):
        tuning = hopper_decode.default_tuning(head_dim, itemsize, hopper_decode.MANY, kv_heads)
        assert tuning.cluster <= 1


@pytest.mark.parametrize("room", [paged_decode, paged_extend])
def test_tuned_files_say_which_device_they_are_of(room: Any) -> None:
    (file,) = (pathlib.Path(room.__file__).parent / "tuned").glob("*.json")
    assert json.loads(file.read_text())["device"] in ("NVIDIA H200", "nvidia_h200")
