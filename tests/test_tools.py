"""The scripts that make the environment on a machine that nobody has prepared."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tools.readme_tables import legal, render

FOUND, TOO_OLD, WITHOUT_VENV, REFUSING_SHIM = (
    'echo "$0"',
    "exit 1",
    "exit 2",
    "echo 'pyenv: command not found' >&2; exit 127",
)


def program(path: pathlib.Path, body: str) -> pathlib.Path:
    """An executable shell script; for find-python, one that answers its probe as a Python would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def find_python(
    repo: pathlib.Path, tmp_path: pathlib.Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run find-python where `bin/` comes first on PATH and `home/` is the home."""
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": f"{tmp_path}/home", **more}
    return subprocess.run(
        [repo / "tools/find-python"], env=env, capture_output=True, text=True, timeout=60
    )


def test_a_shim_that_refuses_to_run_is_passed_over_for_pyenvs_own_python(repo, tmp_path):
    program(tmp_path / "bin/python3", TOO_OLD)
    program(tmp_path / "bin/python", TOO_OLD)
    for minor in (12, 13, 14):
        program(tmp_path / f"bin/python3.{minor}", REFUSING_SHIM)
    good = program(tmp_path / "home/.pyenv/versions/3.12.7/bin/python3", FOUND)
    done = find_python(repo, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(good))


def test_a_python_that_uv_keeps_is_found(repo, tmp_path):
    for name in ("python3", "python", "python3.12", "python3.13", "python3.14"):
        program(tmp_path / "bin" / name, TOO_OLD)
    good = program(
        tmp_path / "home/.local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3", FOUND
    )
    done = find_python(repo, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(good))


def test_the_default_python_wins_when_it_is_new_enough(repo, tmp_path):
    good = program(tmp_path / "bin/python3", FOUND)
    program(tmp_path / "bin/python3.12", FOUND)
    assert find_python(repo, tmp_path).stdout.strip() == str(good)


def test_a_named_python_that_does_not_do_is_refused_and_nothing_else_is_taken(repo, tmp_path):
    program(tmp_path / "bin/python3", FOUND)
    done = find_python(repo, tmp_path, PYTHON=str(program(tmp_path / "old", TOO_OLD)))
    assert (done.returncode, done.stdout) == (1, "")
    assert "CPython 3.12 to 3.14" in done.stderr


@pytest.mark.skipif(
    any(
        pathlib.Path(folder, f"python3.{minor}").exists()
        for folder in ("/usr/bin", "/usr/local/bin")
        for minor in (12, 13, 14)
    ),
    reason="this machine's own Python is always found",
)
@pytest.mark.parametrize(
    ("answer", "advice"),
    [(TOO_OLD, "uv python install 3.12"), (WITHOUT_VENV, "apt install python3-venv")],
)
def test_where_nothing_is_found_the_message_says_what_to_install(repo, tmp_path, answer, advice):
    for name in ("python3", "python", "python3.12", "python3.13", "python3.14"):
        program(tmp_path / "bin" / name, answer)
    done = find_python(repo, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert advice in done.stderr


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        ("echo '| Driver Version: 580.65.06  CUDA Version: 13.0 |'", "cuda13"),
        ("echo '| Driver Version: 550.54.14  CUDA Version: 12.4 |'", "cuda12"),
        ("echo 'has failed because it could not communicate with the NVIDIA driver'; exit 9", ""),
    ],
)
def test_the_cuda_extra_follows_the_driver_only_where_nvidia_smi_works(
    repo, tmp_path, answer, extra
):
    program(tmp_path / "bin/nvidia-smi", answer)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(
        [repo / "tools/accelerator"], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, extra)


def test_generated_parts_are_replaced_and_the_rest_is_kept():
    text = "a\n<!-- generated: sampling-options -->\nOUTDATED\n<!-- end generated -->\nb\n"
    out = render(text)
    assert "OUTDATED" not in out
    assert out.startswith("a\n<!-- generated") and out.endswith("<!-- end generated -->\nb\n")
    assert render(out) == out


def test_a_part_that_nothing_generates_is_an_error():
    with pytest.raises(KeyError, match="nobody"):
        render("<!-- generated: nobody -->\n<!-- end generated -->")


def test_legal_values_are_shown_with_their_bounds():
    from jaxllm.sampling.options import OPTIONS

    assert legal(OPTIONS["top_p"]) == "> 0, ≤ 1"
    assert legal(OPTIONS["top_k"]) == "≥ 0, or -1"
