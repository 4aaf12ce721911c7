"""Step programs of portable back ends, compiled for GPUs that are not here: they are taken, write
pages in place, and need hardly more memory for a deep model than for a shallow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.runtime.cards import CARDS
from tests.engine.runtime.h200 import Compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

MIB = 2**20
FEW, MANY = 4, 12  # layers
# MiB that a step may need for each further layer: plans, and what XLA loses between buffers. The
# sums of one layer of a 7B take 220, an unpacked layer of 4-bit weights 445.
MOST_A_LAYER = 20
STEPS = [
    ("qwen2.5-7b", "extend", None, "bfloat16"),
    ("qwen2.5-7b", "decode", None, "bfloat16"),
    ("qwen2.5-7b", "extend", "int4", "bfloat16"),
    ("qwen2.5-7b", "extend", "int8", "float8_e4m3fn"),
    ("qwen3-30b-a3b", "extend", None, "bfloat16"),
    ("gpt-oss-20b", "extend", None, "bfloat16"),
    ("deepseek-v2-lite", "extend", None, "bfloat16"),
    ("gemma2-9b", "extend", None, "bfloat16"),
]
FAST = [("rtx-4090", *STEPS[0]), ("rtx-4090", *STEPS[2])]


@pytest.fixture(scope="module")
def compilers() -> Iterator[Callable[[str], Compiler]]:
    """The compiler of each card, begun with its first program."""
    begun: dict[str, Compiler] = {}

    def compiler(card: str) -> Compiler:
        if card not in begun:
            begun[card] = Compiler(card)
        return begun[card]

    yield compiler
    for process in begun.values():
        process.close()


@pytest.mark.parametrize(
    ("card", "model", "program", "quantization", "pages"),
    [
        pytest.param(card, *step, marks=[] if (card, *step) in FAST else pytest.mark.slow)
        for card in CARDS
        for step in STEPS
    ],
)
def test_a_steps_need_does_not_grow_with_depth(
    card: str,
    model: str,
    program: str,
    quantization: str | None,
    pages: str,
    compilers: Callable[[str], Compiler],
) -> None:
    few, many = (
        report
        for layers in (FEW, MANY)
        for report in compilers(card).reports(
            model=model,
            kind=program,
            places=[-1],
            layers=layers,
            quantization=quantization,
            kv_dtype=pages,
            backend="xla",
        )
    )
    for report in (few, many):
        assert report["refused"] is None, report
        assert report["not_aliased"] == [], report
        assert report["copies"] == [], report
    growth = (many["needed_bytes"] - few["needed_bytes"]) / (MANY - FEW)
    assert growth <= MOST_A_LAYER * MIB, (few["needed_bytes"], many["needed_bytes"])
