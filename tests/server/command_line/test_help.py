"""--help by topic."""

from __future__ import annotations

import pytest

from jaxllm.server.command_line.flags import parser
from jaxllm.server.command_line.options import parse


def shown(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a topic's help prints."""
    with pytest.raises(SystemExit) as exit:
        parse([topic], {})
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_is_an_overview_that_names_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("--help", capsys)
    assert "--max-model-len" in text
    assert "--preemption-mode" not in text
    for group in ("Model", "Memory", "Scheduler", "Parallel", "Server", "Security", "Logging"):
        assert f"--help={group}" in text
    assert len(text.splitlines()) < 70


def test_help_on_all_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("--help=all", capsys)
    assert all(flag in text for action in parser()._actions for flag in action.option_strings)


@pytest.mark.parametrize(
    ("topic", "has", "lacks"),
    [
        ("security", "--admin-key", "--port"),
        ("chat", "--tool-call-parser", "--port"),
        ("max_num_seqs", "--max-num-seqs", "--port"),
        ("--port", "port to listen on", "--dtype"),
        ("LoRA", "adapters are not supported yet", "--port"),
        ("nonsense", "no option mentions 'nonsense'; groups are Model, Memory", "--port"),
    ],
)
def test_help_on_a_group_or_a_word_is_that_part(
    topic: str, has: str, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(f"--help={topic}", capsys)
    assert has in text
    assert lacks not in text
