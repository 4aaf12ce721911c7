"""The command line of the load on a server."""

from __future__ import annotations

import pytest

from benchmarks import serving


@pytest.mark.parametrize(
    "words",
    [
        "--num-prompts 0",
        "--num-prompts x",
        "--request-rate 0",
        "--request-rate nan",
        "--burstiness -1",
        "--max-concurrency -2",
        "--processes 0",
        "--random-input-len 0",
        "--random-output-len 0",
        "--random-range-ratio 2",
    ],
)
def test_a_load_that_cannot_be_is_refused_in_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.options().parse_args(words.split())
    assert ended.value.code == 2
    assert f"argument {words.split()[0]}" in capsys.readouterr().err.splitlines()[-1]
