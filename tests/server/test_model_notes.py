"""What a model's folder says to its users, and what is no such text."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from jaxllm.server.model_notes import FILE, ModelNotes, read_notes
from tests.server.harness import Running


def test_notes_are_a_line_and_examples(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"description": "Knows sums.", "examples": ["1 + 1?"]}))
    assert read_notes(tmp_path) == ModelNotes("Knows sums.", ("1 + 1?",))
    assert read_notes(tmp_path / "none") == ModelNotes()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"description": 1}',
        b'{"description": "' + b"x" * 301 + b'"}',
        b'{"examples": "one"}',
        b'{"examples": [""]}',
        b'{"examples": [1]}',
        json.dumps({"examples": ["a"] * 9}).encode(),
        b" " * 70_000,
    ],
)
def test_a_file_that_is_no_such_text_is_reported_and_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING, "jaxllm.server"):
        assert read_notes(tmp_path) == ModelNotes()
    assert "is not used" in caplog.text


def test_a_card_tells_defaults_and_notes(server: Running) -> None:
    card = server.get("/v1/models").json()["data"][0]
    assert card["default_parameters"]["temperature"] == 1.0
    assert card["default_parameters"]["top_p"] == 1.0
    assert (card["description"], card["examples"]) == ("", [])
    assert card["family"]


def test_the_defaults_of_a_card_are_the_operators() -> None:
    with Running(None, defaults={"temperature": 0.25}) as running:
        card = running.get("/v1/models").json()["data"][0]
    assert card["default_parameters"]["temperature"] == 0.25


def test_the_demo_has_notes() -> None:
    notes = read_notes(Path(__file__).parents[2] / "jaxllm" / "demo")
    assert notes.description
    assert len(notes.examples) >= 4
