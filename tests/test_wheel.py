"""What a user installs: both packages with their data, and nothing that would shadow the user's own
modules."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from what git tracks."""
    repo = pathlib.Path(__file__).parents[1]
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repo, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (repo / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((repo / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(folder / "source"),
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return set(zipfile.ZipFile(next(folder.glob("jaxllm-*.whl"))).namelist())


@pytest.mark.slow
def test_the_wheel_holds_both_packages_with_their_data(files):
    wanted = {"__init__.py", "cli/__init__.py", "py.typed", "server/__main__.py", "engine/engine.py"}
    assert {f"jaxllm/{name}" for name in wanted} <= files
    page = {"index.html", "app.js", "icon.svg", "chat/view.js", "engine/view.js", "lib/api.js"}
    assert {f"jaxllm/server/page/static/{name}" for name in page} <= files
    assert {"pallas_kernels/__init__.py", "pallas_kernels/py.typed"} <= files
    assert {
        f"jaxllm/demo/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    } <= files


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(files):
    roots = {name.split("/")[0] for name in files}
    assert {root for root in roots if not root.endswith(".dist-info")} == {
        "jaxllm",
        "pallas_kernels",
    }
    assert [name for name in files if "test" in name or name.endswith(".pyc")] == []
