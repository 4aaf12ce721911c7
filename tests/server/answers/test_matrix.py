"""Every way to ask for tools, thought and structure, in every format: an answer is what
docs/api.md promises, whatever the model would rather say, or the request is a 400 at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.server.answers.asking import PARIS, THOUGHT, ask, check_promise
from tests.server.answers.pairwise import pairwise
from tests.server.answers.replies import streamed, whole
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import WORLDS, Call
from tools.answer_matrix import Cell, cells, promise

PREFACE = "Let me see."
SUNNY = "It is sunny: 21 degrees, and [clear] (mostly)."
STRUCTURED = '{"celsius": 21, "sky": "clear"}'
TIME: Call = ("get_time", {})
WRONG: Call = ("get_weather", {"city": "Paris", "days": 99, "unit": "kelvin"})
UNKNOWN: Call = ("get_rain", {"city": "Paris"})


class Wish(NamedTuple):
    """What a model would say.

    Attributes:
        text: without the thought.
        preface, calls: what it means where nothing binds it; None: it is text.
        honoured: it is what the request demands, so that it is said as it is.
    """

    text: str
    preface: str
    calls: tuple[Call, ...]
    honoured: bool


def wishes(cell: Cell) -> list[Wish]:
    """A wish that the request allows for each kind of answer, and stubborn ones."""
    world, held = WORLDS[cell.format], promise(cell.format, cell.request)
    most = 2 if held.most_calls is None else held.most_calls
    calls = (PARIS, TIME)[:most]
    if cell.format in ("glm4", "gpt_oss"):  # whose answers end with the first call
        calls = calls[:1]
    found = []
    if held.most_calls != 0:
        preface = PREFACE if held.text == "anything" and cell.format != "glm4" else ""
        text = world.before_call(preface) + world.calls(calls)
        found.append(Wish(text, preface, calls, honoured=True))
    reply = STRUCTURED if held.text == "structure" else SUNNY
    found.append(Wish(world.reply(reply), reply, (), honoured=held.text != "nothing"))
    free = held.text == "anything" and not held.bound and held.most_calls is None
    for call in (WRONG, UNKNOWN):
        found.append(Wish(world.calls((call,)), "", (call,), honoured=free and call is WRONG))
    found.append(Wish(world.calls(()) + "{}[]()<>", "", (), honoured=False))
    return found


def check_cell(server: ScriptedServer, cell: Cell) -> None:
    """Hold the server to what a cell promises."""
    held = promise(cell.format, cell.request)
    for wish in wishes(cell):
        answer = ask(server, cell, wish.text)
        if held.refused:
            assert answer.status == 400 and answer.error["param"]
            continue
        said = streamed(answer) if cell.streamed else whole(answer)
        if cell.streamed:
            other = whole(ask(server, cell._replace(streamed=False), wish.text))
            assert replace(said, ids=[]) == replace(other, ids=[])
        if cell.thinking or wish.honoured or WORLDS[cell.format].closed:
            assert said.thought == (THOUGHT if cell.thinking else ""), wish
        assert said.reasoning_tokens is not None
        assert said.reasoning_tokens or not said.thought
        assert cell.thinking or not wish.honoured or said.reasoning_tokens == 0
        assert said.reasoning_tokens <= said.completion_tokens
        check_promise(said, cell)
        if wish.honoured:
            meant = [[name, arguments] for name, arguments in wish.calls]
            assert [[name, json.loads(arguments)] for name, arguments in said.calls] == meant, wish
            assert said.text.strip() == wish.preface, wish


ALL = cells()
FEW = pairwise(ALL, [(cell.format, cell.thinking, *cell.request, cell.streamed) for cell in ALL])


@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.name)
def test_an_answer_is_what_its_request_was_promised(
    servers: dict[bool, ScriptedServer], cell: Cell
) -> None:
    check_cell(servers[True], cell)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.name)
def test_every_answer_is_what_its_request_was_promised(
    servers: dict[bool, ScriptedServer], cell: Cell, tokens: bool
) -> None:
    check_cell(servers[tokens], cell)
