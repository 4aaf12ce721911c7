"""Step programs of models whose output head has 8 bits, compiled for an H200: one kernel of its
own, whose logits are float32, and no array of the head's size beside it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.runtime.h200 import Compiler, missing
from tests.engine.runtime.test_compiled_for_h200 import LIMITS, check

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "group", "kind", "place", "devices"),
    [
        ("llama-3.1-8b", 16, "decode", -1, 1),
        ("llama-3.1-8b", 16, "decode", 0, 1),
        ("llama-3.1-8b", 16, "decode", -1, 8),
        ("llama-3.1-8b", 16, "extend", -1, 1),
        ("llama-3.1-8b", 16, "prompt_logprobs", -1, 1),
        ("qwen2.5-7b", 16, "decode", -1, 1),
        ("qwen3-0.6b", 32, "decode", 0, 1),  # its table is its head
        ("qwen3-0.6b", 32, "decode", -1, 2),
    ],
)
def test_logits_of_a_head_in_8_bits_are_one_kernel(
    model: str, group: int, kind: str, place: int, devices: int, compiler: Compiler
) -> None:
    given: dict[str, Any] = {"model": model, "kind": kind, "places": [place], "devices": devices}
    (report,) = compiler.reports(**given, head_group=group)
    check(model, [report], LIMITS.get(kind))
    head = [name for name in report["kernels"] if name.startswith("int8_w8a16_matmul_")]
    assert len(head) == 1 and report["calls"]["mosaic_gpu_v2"] > 0, report["kernels"]
