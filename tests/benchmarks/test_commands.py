"""The pages on benchmarks and modes, and `python -m benchmarks`, name what exists."""

from __future__ import annotations

import importlib
import pathlib
import re
import shlex
import sys

import pytest

import benchmarks.__main__ as listing

REPO = pathlib.Path(__file__).parents[2]
PAGES = [(REPO / "docs" / name).read_text() for name in ("benchmarks.md", "modes.md")]
LINES = [
    line
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
COMMANDS = [
    shlex.split(line)[2:] for line in LINES if line.startswith(".venv/bin/python -m benchmarks.")
]


def help_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `python -m NAME --help` prints."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as done:
        importlib.import_module(name).main()
    assert done.value.code == 0
    return capsys.readouterr().out


def test_the_page_has_commands():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_uses_options_that_exist(command, monkeypatch, capsys):
    text = help_of(command[0], monkeypatch, capsys)
    assert [word for word in command[1:] if word.startswith("--") and word not in text] == []


@pytest.mark.parametrize("name", [name for name in listing.HERE if name != "report"])
def test_every_listed_benchmark_has_help(name, monkeypatch, capsys):
    assert "usage:" in help_of(f"benchmarks.{name}", monkeypatch, capsys)


def test_every_benchmark_that_can_be_run_is_listed():
    found = {
        path.stem
        for path in (REPO / "benchmarks").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert found - {"__main__"} == set(listing.HERE)
