"""Completion in shells."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

import pytest

from jaxllm import cli
from jaxllm.cli.convert import DTYPES
from jaxllm.cli.shells import SHELLS, script
from jaxllm.weights import convert


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(map(shlex.quote, ["jaxllm", *words]))
    code = (
        f"{script('bash', cli.VERBS)}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _jaxllm; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["co"], ["complete", "convert", "collect-env", "completion"]),
        (["serve", "m", "--max-num-s"], ["--max-num-seqs"]),
        (["check", "m", "--scheduling-policy", ""], ["fcfs", "priority"]),
        (["completion", "z"], ["zsh"]),
        (["serve", "m", "--num-scheduler"], []),
        (["serve", "pyproj"], ["pyproject.toml"]),
        (["chat", "--sys"], ["--system-prompt"]),
        (["complete", "--sys"], []),
        (["complete", "--max-t"], ["--max-tokens"]),
        (["convert", "a", "b", "--dtype", "bf"], ["bfloat16"]),
        (["convert", "a", "b", "--as"], ["--as-served"]),
    ],
    ids=range(11),
)
def test_bash_completes(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_each_shell_has_a_script_and_others_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shell in SHELLS:
        assert cli.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert "max-num-seqs" in text
        assert "collect-env" in text
        assert "system-prompt" in text
        assert "%(" not in text
    assert cli.main(["completion", "tcsh"]) == cli.main(["completion"]) == 2
    assert "usage: jaxllm completion bash|zsh|fish" in capsys.readouterr().err


def test_a_script_is_written_without_jax_and_still_names_every_type_of_convert() -> None:
    assert tuple(convert.DTYPES) == DTYPES
    code = "import sys; from jaxllm.cli.shells import script; script('bash', []); "
    code += "raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
