"""Plots from a small result."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import plots

pytest.importorskip("matplotlib", reason="needs the bench extra")

TPOT = {"shape": "tiny-1b", "figure": "tpot_ms", "context": 1024, "date": "2026-01-02"}
RATE = {"shape": "tiny-1b", "figure": "throughput", "prompts": 8, "date": "2026-01-02"}
KERNELS = {
    "device": "NVIDIA H200",
    "mode": "time",
    "rows": [
        {"op": "decode", "B": 64, "tuning": None, "us": 2.0, "TB/s": 2.15},
        {"op": "extend", "error": "no"},
    ],
}


def engine(name: str, factor: float) -> dict:
    """A record with two batches and one throughput."""
    rows = [TPOT | {"batch": batch, "value": factor * batch} for batch in (1, 16)] + [
        RATE | {"mode": "greedy", "value": 1000 / factor}
    ]
    return {
        "benchmark": "engine",
        "engine": name,
        "machine": "NVIDIA H200",
        "how": "so.",
        "rows": rows,
    }


def test_every_plot_is_drawn_with_its_words_and_drawing_again_changes_nothing(tmp_path):
    for name, record in {
        "a": engine("jaxllm", 1.0),
        "b": engine("other 2.0", 2.0),
        "c": KERNELS,
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    files = plots.draw(tmp_path, tmp_path / "out")
    texts = {file.name: file.read_text() for file in files}
    assert list(texts) == ["tpot.svg", "throughput.svg", "kernels.svg"]
    for name in ("tpot.svg", "throughput.svg"):
        assert {"tiny-1b", "jaxllm", "other 2.0"} <= set(
            re.findall(r">([^<>]+)</text>", texts[name])
        )
    assert "2.15 TB/s" in texts["kernels.svg"] and "decode B64" in texts["kernels.svg"]
    plots.draw(tmp_path, tmp_path / "out")
    assert {file.name: file.read_text() for file in files} == texts


def test_nothing_is_drawn_of_what_was_not_measured(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(engine("other 2.0", 2.0)))
    (tmp_path / "c.json").write_text(json.dumps(KERNELS | {"device": "Card Y"}))
    assert plots.draw(tmp_path, tmp_path / "out") == []
