"""The scripts of examples/ run as their first lines say."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.demo_server import Demo

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
MAX_LINES = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the demo model that compiles what it needs."""
    demo = Demo("--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "2048")
    yield demo.url
    demo.close()


def run(script: str, *arguments: str, typed: str = "") -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        input=typed,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_chat_streams_thinking_and_answers(url: str) -> None:
    out = run("chat.py", url, typed="What is 27 + 58?\nWhat is 3 + 4?\n")
    first, second = out.splitlines()
    assert first.startswith("\033[2m") and first.endswith("\033[0m85")
    assert second.endswith("\033[0m7")


@pytest.mark.slow
def test_an_agent_calls_the_calculator_and_answers(url: str) -> None:
    call, answer = run("agent.py", url, "What is 4839 * 273?").splitlines()
    assert call.startswith("calculator(") and call.endswith("= 1321047")
    assert answer == "1321047"


@pytest.mark.slow
def test_objects_come_out_of_texts(url: str) -> None:
    assert run("extract.py", url).splitlines() == [
        "Person(name='Ann', age=30)",
        "Person(name='Tom', age=7)",
    ]


@pytest.mark.slow
def test_later_turns_of_a_conversation_find_earlier_ones_cached(url: str) -> None:
    lines = run("turns.py", url).splitlines()
    cached = [int(line.rpartition("[")[2].partition(" ")[0]) for line in lines]
    assert cached == sorted(cached) and cached[0] < cached[1] < cached[-1]
    assert "85" in lines[0] and "2, 7, 9" in lines[1]


@pytest.mark.slow
def test_research_scores_watches_and_steers() -> None:
    right, wrong, doubt, steered = run("logits.py").splitlines()
    assert float(right.split()[-4]) < float(wrong.split()[-4])
    assert len(doubt.split()) == 2 + 4
    assert steered == "steered: 9999"


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name
