"""What each output of the table means, read whole and cut at every place."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxllm.server.parsing.parts import Part
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import find_reasoning, tool_formats
from tests.server.parsing.feeding import calls, fed, reasoning, reply
from tests.server.parsing.outputs import OUTPUTS, TOOLS, Output

MADE_ID = re.compile(r"id='(call_[0-9a-f]{24}|[A-Za-z0-9]{9})'")


def read(output: Output, pieces: list[str]) -> list[Part]:
    """The parts of an output that comes in pieces."""
    thinks = None if output.prompt is None else find_reasoning("qwen3", None)
    return fed(pipeline(thinks, tool_formats()[output.format], output.prompt or "", TOOLS), pieces)


def said(arguments: str) -> Any:
    """The value of arguments; those of a call that broke off as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_an_output_means_what_the_table_says(output: Output) -> None:
    parts = read(output, [output.text])
    found = [(name, said(arguments)) for name, arguments in calls(parts)]
    wanted = list(output.calls)
    for number, (name, arguments) in enumerate(wanted):
        if arguments is None:  # the beginning of the arguments, whatever it is
            assert isinstance(found[number][1], str)
            wanted[number] = (name, found[number][1])
    assert found == wanted
    assert reply(parts).strip() == output.reply.strip()
    assert reasoning(parts).strip() == output.thought.strip()


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_an_output_means_the_same_wherever_it_is_cut(output: Output) -> None:
    def plain(pieces: list[str]) -> str:
        return MADE_ID.sub("", repr(read(output, pieces)))

    text, whole = output.text, plain([output.text])
    assert plain(list(text)) == whole
    for at in range(1, len(text)):
        assert plain([text[:at], text[at:]]) == whole, text[:at]


def test_every_format_has_rows_that_call_and_rows_that_do_not() -> None:
    assert {output.format for output in OUTPUTS if output.calls} == tool_formats().keys()
    assert len({output.name for output in OUTPUTS}) == len(OUTPUTS)
