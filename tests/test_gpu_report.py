"""The report of the GPU tests: every outcome is recorded, with its device and versions."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from tests.gpu_report import slug, versions

TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert "left" == "right"
@pytest.mark.skip(reason="no device")
def test_left_out(): pass
@pytest.fixture
def broken():
    yield
    raise RuntimeError("at the end")
def test_bad_end(broken): pass
"""


def run(repo: pathlib.Path, folder: pathlib.Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(repo / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["-p", "tests.gpu_report", *more, str(folder / "test_some.py")]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)


def test_a_report_holds_every_outcome_with_device_and_versions(repo, tmp_path):
    done = run(repo, tmp_path, "--gpu-report", str(tmp_path / "out"))
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "gpu-tests-cpu.json"
    report = json.loads(path.read_text())
    assert report["device"] == "cpu"
    assert report["exit_status"] == 1
    assert report["counts"] == {"failed": 2, "passed": 1, "skipped": 1}
    assert report["packages"]["jax"] == versions()["jax"]
    tests = {test["test"].split("::")[1]: test for test in report["tests"]}
    assert [tests[name]["outcome"] for name in ("test_good", "test_left_out")] == [
        "passed",
        "skipped",
    ]
    assert "right" in tests["test_bad"]["error"]
    assert "at the end" in tests["test_bad_end"]["error"]
    assert all(test["seconds"] >= 0 for test in report["tests"])


def test_without_the_option_no_report_is_written(repo, tmp_path):
    assert run(repo, tmp_path).returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".json") == []


def test_the_devices_name_is_short_in_file_names():
    assert [slug(name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu")] == [
        "h200",
        "h100-80gb-hbm3",
        "cpu",
    ]


def test_only_installed_packages_have_versions():
    assert {"jax", "jaxlib", "numpy"} <= versions().keys()
    assert "torch" not in versions()
