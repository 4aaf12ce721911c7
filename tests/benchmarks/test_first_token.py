"""The host's part of a first token is taken from an engine whose programs compute nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(("programs", "devices"), [("none", 1), ("empty", 2)])
def test_the_parts_of_a_call_are_told(programs: str, devices: int, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.first_token", "--model", "shape:tiny"]
    command += ["--programs", programs, "--devices", str(devices), "--before", str(REPO)]
    command += ["--rounds", "1", "--calls", "3", "--prompts", "20", "--output-json", str(out)]
    subprocess.run(command, cwd=REPO, check=True, timeout=300, capture_output=True)
    found = json.loads(out.read_text())["figures"]
    assert found.keys() == {"now", "before"}
    for figures in (found["now"]["20"], found["before"]["20"]):
        parts = [figures[name] for name in ("before", "launches", "after")]
        assert min(parts) > 0 and max(parts) < figures["all"]
