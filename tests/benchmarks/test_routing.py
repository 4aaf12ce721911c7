"""What stands around the products of experts, timed by the reference, and launches counted."""

from __future__ import annotations

import pytest

from benchmarks import routing
from pallas_kernels.grouped_matmul.cases import ModelShape

SMALL = ModelShape(experts=4, choices=2, width=64, inner=32)
HLO = """HloModule a

%fused (p: f32[2]) -> f32[2] {
  ROOT %n = f32[2]{0} negate(%p)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %a = (f32[2]{0}, s32[1]{0}) custom-call(%x), custom_call_target="k"
  %b = f32[2]{0} get-tuple-element(%a), index=0
  ROOT %c.1 = f32[2]{0} fusion(%b), kind=kLoop, calls=%fused
}
"""


def test_a_layer_is_timed_at_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LAYERS", 2)
    monkeypatch.setattr(routing, "BACKENDS", ("reference",))
    rows = list(routing.rows_of("small", SMALL, [1, 20], 0.001))
    assert [(row["tokens"], row["backend"]) for row in rows] == [
        (1, "reference"),
        (20, "reference"),
    ]
    assert all(row["us"] > 0 and row["launches"] > 0 for row in rows)
    assert all(row["differ"] == 0 and row["error"] == 0 for row in rows)


def test_launches_are_those_of_the_programs_first_computation() -> None:
    assert routing.launches(HLO) == 2
