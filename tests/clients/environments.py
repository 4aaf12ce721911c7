"""An environment of its own for each client: a venv, or a folder of npm."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

SCRIPTS = pathlib.Path(__file__).with_name("scripts")
INSTALL_SECONDS = 1200


@dataclass(frozen=True)
class Client:
    """A script and the packages that it needs, of the versions that it was written for."""

    script: str
    packages: tuple[str, ...]

    def command(self, folder: pathlib.Path) -> list[str]:
        """Install the packages into a folder; the command that runs the script there."""
        if self.script.endswith(".mjs"):
            npm_install(folder, *self.packages)
            for script in SCRIPTS.glob("*.mjs"):  # node looks for packages beside the script
                shutil.copy(script, folder)
            return ["node", str(folder / self.script)]
        programs = pip_install(folder, *self.packages)
        return [str(programs / "python"), str(SCRIPTS / self.script)]


def pip_install(folder: pathlib.Path, *packages: str) -> pathlib.Path:
    """Packages in a venv; the folder of its programs."""
    done = run([sys.executable, "-m", "venv", str(folder)])
    assert done.returncode == 0, done.stderr
    programs = folder / "bin"
    done = run([str(programs / "python"), "-m", "pip", "install", "--quiet", *packages])
    assert done.returncode == 0, done.stderr
    return programs


def npm_install(folder: pathlib.Path, *packages: str) -> None:
    """Packages of npm in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    done = run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages])
    assert done.returncode == 0, done.stderr


def run(
    command: list[str],
    seconds: float = INSTALL_SECONDS,
    cwd: pathlib.Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """A command's end, output and errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command,
        env=environment | variables,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def need(tool: str, *question: str) -> None:
    """Skip the test unless `tool` is here and its package index answers the question."""
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    if run([tool, *question], seconds=60).returncode != 0:
        pytest.skip(f"{tool} cannot reach its package index")
