"""Engines beside each other: rows from drivers' lines, tables and the headline from rows."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from benchmarks import ceilings, compare, import_driver, report

LINES = [
    {
        "engine": "x",
        "shape": "s",
        "figure": "tpot_ms",
        "batch": 1,
        "context": 1024,
        "value": 4.0,
        "tok_s": 250.0,
    },
    {
        "engine": "x",
        "shape": "s",
        "figure": "throughput",
        "mode": "greedy",
        "prompts": 8,
        "in_tok": 9,
        "seconds": 2.0,
        "out_tok_s": 50.0,
    },
    {"engine": "x", "shape": "s", "figure": "multi_turn", "users": 64, "turns": 8, "seconds": 5.0},
    {
        "figure": "http",
        "label": "x",
        "model": "/models/s",
        "prompts": 400,
        "rate": 20.0,
        "out_tok_s": 9.0,
        **{name: {"p50": 1.0, "p99": 2.0} for name in ("ttft_ms", "tpot_ms", "itl_ms")},
    },
    {"figure": "http", "model": "s", "prompts": 256, "rate": 0, "out_tok_s": 77.0},
    {"figure": "something else", "value": 1},
]


def imported(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict], *options: str
) -> None:
    """Run the importer on a driver's output: JSON lines among other text."""
    text = "a line of a log\n" + "".join(json.dumps(line) + "\n" for line in lines) + "{not json\n"
    (folder / "lines.jsonl").write_text(text)
    arguments = [
        "import_driver",
        str(folder / "lines.jsonl"),
        "--results",
        str(folder),
        "--machine",
        "Card X1",
        *options,
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    import_driver.main()


def test_every_figure_of_a_driver_becomes_a_row_with_its_date(tmp_path, monkeypatch):
    imported(tmp_path, monkeypatch, LINES, "--date", "2026-01-02")
    record = json.loads((tmp_path / "engine-jaxllm-x1.json").read_text())
    found = {compare.label(row): row["value"] for row in record["rows"]}
    assert found == {
        "TPOT ms, 1 × 1024": 4.0,
        "8 mixed prompts, output tokens/s, greedy": 50.0,
        "8 turns of 64 users from 512 tokens, s": 5.0,
        "256 mixed prompts over HTTP, output tokens/s": 77.0,
        "20 requests/s over HTTP, TTFT ms, median": 1.0,
        "20 requests/s over HTTP, TTFT ms, p99": 2.0,
        "20 requests/s over HTTP, TPOT ms, median": 1.0,
        "20 requests/s over HTTP, ITL ms, p99": 2.0,
    }
    assert {row["date"] for row in record["rows"]} == {"2026-01-02"}
    assert {row["shape"] for row in record["rows"]} == {"s"}


def test_a_newer_figure_replaces_the_older_one_and_the_others_stay(tmp_path, monkeypatch):
    imported(tmp_path, monkeypatch, LINES, "--date", "2026-01-02", "--how", "by hand.")
    imported(
        tmp_path, monkeypatch, [LINES[0] | {"value": 3.5, "tok_s": 286.0}], "--date", "2026-01-09"
    )
    record = json.loads((tmp_path / "engine-jaxllm-x1.json").read_text())
    tpot = [row for row in record["rows"] if row["figure"] == "tpot_ms"]
    assert [(row["value"], row["date"]) for row in tpot] == [(3.5, "2026-01-09")]
    assert len(record["rows"]) == 8
    assert record["how"] == "by hand."


def test_the_record_of_the_engine_benchmark_is_imported_too(tmp_path):
    (tmp_path / "out.json").write_text(
        json.dumps(
            {"benchmark": "engine-figures", "date": "2026-03-04", "figures": LINES[:2]}, indent=1
        )
    )
    assert [
        (row["value"], row["date"]) for row in import_driver.read(tmp_path / "out.json", "never")
    ] == [
        (4.0, "2026-03-04"),
        (50.0, "2026-03-04"),
    ]


def engine(name: str, **values: float) -> dict:
    """A record: `tpot` in ms (less is better), `rate` in tokens/s (more is better)."""
    figures = {
        "tpot": {"figure": "tpot_ms", "batch": 1, "context": 1024},
        "rate": {"figure": "throughput", "mode": "greedy", "prompts": 8},
    }
    rows = [
        {"shape": "s", **figures[at], "value": value, "date": "2026-01-02"}
        for at, value in values.items()
    ]
    return {"benchmark": "engine", "engine": name, "machine": "Card X1", "how": "so.", "rows": rows}


def test_a_ratio_above_one_means_better_whichever_way_the_figure_points():
    table = compare.tables(
        [engine("jaxllm", tpot=4.0, rate=2000.0), engine("other", tpot=5.0, rate=1000.0)]
    )
    assert "| TPOT ms, 1 × 1024 | 4 | 5 | 1.25× |" in table
    assert "| 8 mixed prompts, output tokens/s, greedy | 2,000 | 1,000 | 2.00× |" in table


def test_the_headline_counts_what_is_ahead_and_names_what_is_behind():
    text = compare.headline(
        [engine("jaxllm", tpot=4.0, rate=900.0), engine("other", tpot=5.0, rate=1000.0)]
    )
    assert text.startswith("Not yet faster than other on one Card X1 in 1 of [2 figures](docs/")
    assert "Behind in 1: s 8 mixed prompts, output tokens/s, greedy (0.90×)." in text
    assert compare.headline([engine("jaxllm", tpot=4.0), engine("other", tpot=5.0)]).startswith(
        "Faster than other on one Card X1 in 1 of [1 figures]"
    )


def test_the_summary_has_a_row_for_each_shape_and_a_dash_where_nothing_was_measured():
    ours = engine("jaxllm", tpot=4.0, rate=2000.0)
    ours["rows"].append({**ours["rows"][0], "shape": "t", "batch": 16})
    ours["rows"].append({**ours["rows"][0], "batch": 64, "context": 8192})
    head, _, *rows = compare.summary([ours, engine("other", tpot=5.0)]).splitlines()
    assert head.startswith("| Card X1, jaxllm / other | TPOT ms, 1 | TPOT ms, 16 |")
    assert rows == [
        "| s | 4 / 5 | – | – | – | – | – | 2,000 / – |",
        "| t | – | 4 / – | – | – | – | – | – |",
    ]
    assert compare.summary([engine("other", tpot=5.0)]) == ""


def test_nothing_is_claimed_without_figures_of_both_on_one_machine():
    assert compare.headline([engine("other", tpot=5.0)]) == ""
    assert (
        compare.headline(
            [engine("jaxllm", tpot=4.0), engine("other", tpot=5.0) | {"machine": "Card Y"}]
        )
        == ""
    )
    assert compare.headline([engine("jaxllm", tpot=4.0), engine("other", rate=5.0)]) == ""


def test_a_figure_that_only_one_has_is_shown_without_a_ratio():
    table = compare.tables([engine("jaxllm", tpot=4.0), engine("other", tpot=5.0, rate=1000.0)])
    assert "| 8 mixed prompts, output tokens/s, greedy | – | 1,000 | – |" in table


def test_figures_that_were_not_measured_again_are_named_and_a_shape_that_was_not_by_its_name():
    ours = engine("jaxllm", tpot=4.0, rate=2000.0)
    older = [row | {"shape": "older"} for row in ours["rows"]]
    ours["rows"][0]["date"] = "2026-01-09"
    note = compare.tables([ours | {"rows": older + ours["rows"]}]).splitlines()[-1]
    expected = "older; s (8 mixed prompts, output tokens/s, greedy)"
    assert note.endswith(f"Not measured again since 2026-01-02: {expected}.")


def test_kernels_are_shown_against_the_ceilings_of_their_machine():
    rows = [
        {"op": "decode", "K": 4, "B": 64, "tuning": None, "us": 250.0, "TB/s": 4.3},
        {"op": "extend", "queries": 8192, "tuning": None, "us": 900.0, "TFLOP/s": 395.0},
        {"op": "decode", "K": 8, "B": 1, "error": "no"},
    ]
    table = report.kernels(
        {"device": "NVIDIA H200", "mode": "time", "rows": rows}, report.ceilings([])
    )
    assert "| decode | K 4, B 64 | 250.0 | 4.3 TB/s | 100% |" in table
    assert "| extend | queries 8192 | 900.0 | 395 TFLOP/s | 50% |" in table
    assert "| decode | K 8, B 1 | failed | – | – |" in table
    assert "| decode | K 4, B 64 | 250.0 | 4.3 TB/s | – |" in report.kernels(
        {"device": "Card Y", "rows": rows}, report.ceilings([])
    )


def test_measured_ceilings_go_before_those_that_are_known():
    figures = {"copy_tb_per_s": 4.0, "read_tb_per_s": 4.5, "matmul_tflop_per_s": 700.0}
    record = {
        "benchmark": "ceilings",
        "machine": {"devices": [{"kind": "NVIDIA H200"}]},
        "figures": figures,
    }
    assert report.ceilings([record])["NVIDIA H200"] == {
        "TB/s": 4.0,
        "GB/s": 4000.0,
        "TFLOP/s": 700.0,
    }


def test_ceilings_are_measured_in_the_right_order_of_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["ceilings", "--gigabytes", "0.05", "--side", "256", "--calls", "10"]
    )
    ceilings.main()
    found = json.loads(capsys.readouterr().out)
    assert 0.0001 < found["copy_tb_per_s"] < 20 and 0.0001 < found["read_tb_per_s"] < 20
    assert 0.0001 < found["matmul_tflop_per_s"] < 2000


def test_every_recorded_figure_is_one_that_the_tables_know():
    for record in report.engines(report.records()):
        for row in record["rows"]:
            assert compare.label(row)
            assert row["value"] > 0
