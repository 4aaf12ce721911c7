"""The TPU back ends of both attention ops on the CPU: interpreted with race detection, lowered for
TPU, and compiled where libtpu is."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from pallas_kernels import mosaic_tpu, paged_decode, paged_extend
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_extend import cases as extend_cases

QUICK = (
    *(("decode", name) for name in ("groups of seven", "softcap and window")),
    *(("extend", name) for name in ("tokens of no row", "window with pages of 64")),
)
CASES = {
    (op, case.name): case
    for op, table in (("decode", decode_cases), ("extend", extend_cases))
    for case in table.CASES
}
TOLERANCE = {"float32": 1e-6, "bfloat16": 5e-3}
TPUS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def op_of(name: str) -> tuple[Any, ModuleType]:
    """The op, and the module of its cases."""
    return (
        (paged_decode.decode_attention, decode_cases)
        if name == "decode"
        else (paged_extend.extend_attention, extend_cases)
    )


def relative_error(op: str, case: Any, dtype: str) -> float:
    """Error of the interpreted kernel against the definition; NaN stays NaN and fails every
    comparison.
    """
    attend, table = op_of(op)
    made = table.inputs(case)
    args = [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in made.args]
    run = functools.partial(
        attend,
        backend="mosaic_tpu",
        **case.options,
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    out = np.asarray(jax.jit(run)(*args), np.float64)
    return float(np.linalg.norm(out - made.expected) / max(np.linalg.norm(made.expected), 1e-9))


def for_tpu(case: Any, dtype: str) -> Any:
    """The case with a head dimension that the kernel takes, or None where its pages are too small
    or its values have a width of their own."""
    fits = case.page_size % mosaic_tpu.sublanes(dtype) == 0 and case.value_dim is None
    return dataclasses.replace(case, head_dim=-(-case.head_dim // 128) * 128) if fits else None


@pytest.mark.parametrize(("op", "name"), QUICK)
def test_the_interpreted_kernel_gives_what_the_definition_says(op: str, name: str) -> None:
    assert (
        relative_error(op, for_tpu(CASES[op, name], "bfloat16"), "bfloat16") < TOLERANCE["bfloat16"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("op", "name"), CASES)
def test_every_shared_case_passes_interpreted(op: str, name: str, dtype: str) -> None:
    case = for_tpu(CASES[op, name], dtype)
    if case is None:
        pytest.skip("pages of less than a register tile and narrower values are refused")
    assert relative_error(op, case, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", ["decode", pytest.param("extend", marks=pytest.mark.slow)])
def test_page_tables_larger_than_scalar_memory_are_served_in_groups_of_rows(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = for_tpu(CASES[op, "around a tile's edge"], "float32")
    width = op_of(op)[1].inputs(case).pages.table.shape[1]
    monkeypatch.setattr(mosaic_tpu, "TABLE_BYTES", 2 * 4 * width)
    assert relative_error(op, case, "float32") < TOLERANCE["float32"]


def abstract(
    op: str, group: int, head_dim: int, page: int, dtype: str, sharding: Any = None
) -> list[jax.ShapeDtypeStruct]:
    """Arguments of a call of real size."""
    make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    pool = make((8192, 8, page, head_dim), dtype)
    tokens, rows = (64, 64) if op == "decode" else (2048, 8)
    lengths = [make((rows,), jnp.int32)] * (1 if op == "decode" else 3)
    return [
        make((tokens, 8 * group, head_dim), dtype),
        pool,
        pool,
        make((rows, 128), jnp.int32),
        *lengths,
    ]


REAL = [
    (4, 128, 64, "bfloat16"),
    (7, 128, 16, "bfloat16"),
    (1, 256, 128, "bfloat16"),
    (2, 128, 32, "float32"),
]


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize(("group", "head_dim", "page", "dtype"), REAL)
def test_the_kernel_lowers_for_tpu(
    op: str, group: int, head_dim: int, page: int, dtype: str
) -> None:
    run = functools.partial(op_of(op)[0], backend="mosaic_tpu", scale=0.1, window=100, softcap=20.0)
    lowered = (
        jax.jit(run)
        .trace(*abstract(op, group, head_dim, page, dtype))
        .lower(lowering_platforms=("tpu",))
    )
    assert lowered.as_text().count("tpu_custom_call") == 1


@pytest.mark.slow
# A program for an absent device cannot be loaded
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("kind", TPUS)
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_the_tpu_compiler_takes_the_kernel_and_copies_no_pool(
    op: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no TPU here to ask about
    device = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[0]
    for group, head_dim, page, dtype in REAL:
        args = abstract(op, group, head_dim, page, dtype, SingleDeviceSharding(device))
        run = functools.partial(op_of(op)[0], backend="mosaic_tpu", scale=0.1)
        text = (
            jax.jit(run)
            .lower(*args, sinks=jax.ShapeDtypeStruct((8 * group,), jnp.float32))
            .compile()
            .as_text()
        )
        short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        assert "tpu_custom_call" in text
        pool = re.escape(f"{short}[8192,8,{page},{head_dim}]")
        assert re.findall(rf" = \(?{pool}.* (?:copy|copy-start|fusion)\(", text) == []


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize(
    ("head_dim", "page", "heads", "dtype", "message"),
    [
        (128, 16, 4, "float16", "bfloat16 or float32 throughout"),
        (64, 16, 4, "bfloat16", "multiple of 128"),
        (128, 8, 4, "bfloat16", "pages of a multiple of 16"),
        (128, 16, 3, "bfloat16", "whole number of query heads"),
    ],
)
def test_what_the_kernel_cannot_take_is_an_error_that_says_so(
    op: str, head_dim: int, page: int, heads: int, dtype: str, message: str
) -> None:
    pages, row = jnp.zeros((3, 2, page, head_dim), dtype), jnp.zeros((1,), jnp.int32)
    rows = [row] if op == "decode" else [row, row, row]
    with pytest.raises(ValueError, match=message):
        op_of(op)[0](
            jnp.zeros((1, heads, head_dim), dtype),
            pages,
            pages,
            row[:, None],
            *rows,
            backend="mosaic_tpu",
            scale=1.0,
        )
