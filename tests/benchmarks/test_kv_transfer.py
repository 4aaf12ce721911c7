"""The benchmark of pages between processes runs."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.mark.slow
def test_both_carriers_are_measured(monkeypatch, capsys, tmp_path):
    import benchmarks.kv_transfer

    path = tmp_path / "result.json"
    command = ["x", "--page-kib", "64", "--pages", "40", "--output-json", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    benchmarks.kv_transfer.main()
    figures = json.loads(path.read_text())["figures"]
    assert set(figures) == {
        "copy",
        *(
            f"{carrier}{what}"
            for carrier in ("shared memory", "tcp")
            for what in ("", ", per CPU second")
        ),
    }
    assert min(figures.values()) > 0
