"""docs/llm.md says what is so: its code runs, and its names exist."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import jaxllm
from jaxllm import EngineConfig
from tests.test_readme import FEW_SHAPES, REPO, run_python

PAGE = (REPO / "docs" / "llm.md").read_text()


@pytest.mark.slow
def test_its_code_runs_from_top_to_bottom() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    text, count, answer, beams, structured, logprobs, code_of_error, metrics, pooled = run_python(
        FEW_SHAPES + code
    ).splitlines()
    assert text == " 46 stop"
    assert count == "[2, 1]"
    assert "46" in answer
    assert beams == "2 True"
    assert re.fullmatch(r'\{"sum":-?\d+\}', structured)
    assert logprobs == "3 1"
    assert code_of_error == "context_length_exceeded"
    assert metrics == "0.0 True"
    size, score = pooled.split()
    assert int(size) > 8 and -1 <= float(score) <= 1


def test_it_names_arguments_and_fields_that_exist() -> None:
    construct = PAGE.split("## Construct")[1].split("## Generate")[0]
    arguments = set(re.findall(r"^\| `(\w+)` \|", construct, re.MULTILINE))
    assert len(arguments) > 10
    assert arguments <= {field.name for field in dataclasses.fields(EngineConfig)}
    results = PAGE.split("## Results")[1].split("## Errors")[0]
    for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", results, re.MULTILINE):
        fields = {field.name for field in dataclasses.fields(getattr(jaxllm, name))}
        assert set(re.findall(r"`(\w+)`", cells)) == fields


def test_it_names_every_method_with_its_parameters() -> None:
    for name, _ in inspect.getmembers(jaxllm.LLM, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert f"`{name}(" in PAGE, name
    for name in ("generate", "chat", "beam_search"):
        written = re.search(rf"`{name}\((.*?)\)`", PAGE, re.DOTALL)
        assert written is not None
        expected = list(inspect.signature(getattr(jaxllm.LLM, name)).parameters)[1:]
        assert re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", written[1].replace("\n", " ")) == expected


@pytest.mark.slow
def test_the_code_of_the_page_on_sampling_runs() -> None:
    page = (REPO / "docs" / "sampling.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert run_python(FEW_SHAPES + code).strip()


def test_the_files_of_a_new_draw_option_exist() -> None:
    steps = (REPO / "docs" / "sampling.md").read_text().split("## Add a draw option")[1]
    files = re.findall(r"^\d\. `(\S+)`", steps, re.MULTILINE)
    assert len(files) == 5
    assert [name for name in files if not (REPO / name).is_file()] == []
