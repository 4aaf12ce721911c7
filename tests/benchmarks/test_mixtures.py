"""A mixture's routed feed-forward timed, with the kernel's place taken by the reference."""

from __future__ import annotations

import pytest

from benchmarks import mixtures
from pallas_kernels.grouped_matmul.cases import ModelShape

SMALL = ModelShape(experts=4, choices=2, width=64, inner=32)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "LAYERS", 2)
    monkeypatch.setattr(mixtures, "OPTIONS", {})
    monkeypatch.setattr(mixtures, "BACKEND", "reference")


def test_every_part_is_timed_at_every_number_of_tokens() -> None:
    rows = list(mixtures.rows_of("small", SMALL, [1, 40], [1.0], 0.001))
    parts = ("gate_up", "down", "whole")
    assert [(row["tokens"], row["part"]) for row in rows] == [
        (tokens, part) for tokens in (1, 40) for part in parts
    ]
    assert all(row["us"] > 0 for row in rows)
    assert [row["experts_hit"] for row in rows] == [2] * 3 + [4] * 3
    assert rows[2]["error"] < 0.02 and rows[5]["error"] < 0.02


def test_rates_count_each_expert_that_was_hit_once() -> None:
    found = mixtures.speed(SMALL, 40, 3, "whole", 1.0)
    assert found["tb_per_s"] == round(2 * 3 * 3 * 64 * 32 / 1e6, 3)
    assert found["tflop_per_s"] == round(2 * 40 * 2 * 3 * 64 * 32 / 1e6, 1)


def test_weights_of_8_bits_are_timed_and_count_half_the_bytes() -> None:
    (row,) = mixtures.rows_of("small", SMALL, [3], [0.0], 0.001, "whole", "fp8")
    assert row["numbers"] == "fp8" and row["error"] < 0.02
    half, whole = (mixtures.speed(SMALL, 3, 3, "whole", 1e-3, own) for own in ("fp8", "bf16"))
    assert 2 * half["tb_per_s"] == whole["tb_per_s"]
