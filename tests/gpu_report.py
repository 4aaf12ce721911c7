"""A pytest plugin that records a run of the GPU tests: `-p tests.gpu_report --gpu-report FOLDER`.

It writes `gpu-tests-DEVICE.json` into the folder: device, versions, and for each test its outcome
and seconds. The file is written at the end of the run, failures included.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
import time
from collections import Counter
from typing import Any

import pytest

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "ml_dtypes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=pathlib.Path, help="folder for the report of this run")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--gpu-report")
    if folder and not hasattr(config, "workerinput"):  # with xdist, the controller alone reports
        config.pluginmanager.register(Report(folder))


class Report:
    """Outcomes of one run.

    Attributes:
      folder: where the report is written; it is made if missing.
      tests: a record per test, in the order of the run.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase (set-up, call or tear-down) of a test; the worst outcome is kept."""
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.failed:
            test["error"] = str(report.longrepr)[-2000:]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        device = device_name()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"gpu-tests-{slug(device)}.json"
        path.write_text(json.dumps(self.record(device, int(exitstatus)), indent=1) + "\n")

    def record(self, device: str, exit_status: int) -> dict[str, Any]:
        """The report's content. `exit_status` is pytest's: 0 when every test passed."""
        return {
            "benchmark": "gpu-tests",
            "date": time.strftime("%Y-%m-%d"),
            "device": device,
            "python": platform.python_version(),
            "packages": versions(),
            "exit_status": exit_status,
            "counts": dict(sorted(Counter(t["outcome"] for t in self.tests.values()).items())),
            "seconds": round(sum(t["seconds"] for t in self.tests.values()), 1),
            "tests": [{"test": name, **test} for name, test in self.tests.items()],
        }


def versions() -> dict[str, str]:
    """Installed versions of `PACKAGES`; a package that is not installed is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """The kind of the first device that JAX runs on."""
    import jax

    return jax.devices()[0].device_kind


def slug(device: str) -> str:
    """The device's name in file names: "NVIDIA H200" is "h200"."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")
