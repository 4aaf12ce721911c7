"""The table of what modes cost: figures come from the records, and their direction is right."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks.modes import READERS, Cost, change, costs, table


def cost(without: float | None, with_mode: float | None, higher: bool) -> Cost:
    return Cost("some mode", "some load", without, with_mode, higher, "some file")


@pytest.mark.parametrize(
    ("without", "with_mode", "higher", "text"),
    [
        (100.0, 97.0, True, "−3.0 %"),
        (100.0, 110.0, True, "+10.0 %"),
        (5.0, 10.0, False, "−50.0 %"),
        (10.0, 8.0, False, "+25.0 %"),
        (None, 8.0, False, "not measured"),
        (10.0, None, True, "not measured"),
    ],
)
def test_a_change_is_positive_where_the_mode_is_faster(
    without: float | None, with_mode: float | None, higher: bool, text: str
) -> None:
    assert change(cost(without, with_mode, higher)) == text


def test_every_mode_of_the_records_has_a_row_with_its_source() -> None:
    found = costs()
    assert {"penalties", "five log-probabilities a token", "batch-invariant"} <= {
        one.mode for one in found
    }
    assert {"8-bit KV pages", "structured output, all rows"} <= {one.mode for one in found}
    assert all(one.source for one in found)
    assert table().count("\n") == len(found) + 1


def test_figures_are_those_of_the_record(repo: pathlib.Path) -> None:
    record = json.loads((repo / "benchmarks/results/structured-7b-h200.json").read_text())
    (row,) = (one for one in costs() if one.mode == "structured output, all rows")
    assert row.without == record["figures"]["free_tok_s"]
    assert row.with_mode == record["figures"]["guided_tok_s"]
    assert change(row).startswith("−12.6")


def test_weights_in_few_bits_stand_beside_the_same_load_in_bfloat16(repo: pathlib.Path) -> None:
    rows = json.loads((repo / "benchmarks/results/engine-jaxllm-h200.json").read_text())["rows"]
    tpot = {row["shape"]: row["value"] for row in rows if row.get("batch") == 256}
    (cost,) = (
        one
        for one in costs()
        if one.mode == "weights in fp8" and one.load == "qwen2.5-7b, TPOT ms, 256 × 1024"
    )
    assert (cost.without, cost.with_mode) == (tpot["qwen2.5-7b"], tpot["qwen2.5-7b in fp8"])
    assert change(cost).startswith("+")


def test_records_that_are_missing_leave_their_rows_out(tmp_path: pathlib.Path) -> None:
    assert costs(tmp_path) == []
    assert len(READERS) == 6
