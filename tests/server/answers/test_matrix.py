"""Every way to ask for tools, thought and structure, in every format: an answer is what
docs/server.md promises, whatever the model would rather say, or the request is a 400 at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import pytest

from jaxllm.server.parsing.formats import find_formats
from tests.server.answers.pairwise import pairwise
from tests.server.answers.replies import Said, streamed, whole
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import WORLDS, Call
from tests.server.harness import Answer
from tools.answer_matrix import Cell, Promise, cells, promise

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
SCHEMAS = {
    "get_weather": WEATHER,
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
ANSWER = {
    "type": "object",
    "properties": {"celsius": {"type": "integer"}, "sky": {"enum": ["clear", "grey"]}},
    "required": ["celsius", "sky"],
    "additionalProperties": False,
}
THOUGHT = 'Paris, so: is 1 < 2? {"name": "get_time"} may wait.'
PREFACE = "Let me see."
SUNNY = "It is sunny: 21 degrees, and [clear] (mostly)."
STRUCTURED = '{"celsius": 21, "sky": "clear"}'
PARIS: Call = ("get_weather", {"city": "Saint-Denis é", "days": 3, "unit": "celsius"})
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


def body_of(cell: Cell) -> dict[str, Any]:
    """The request of a cell."""
    state = "opened" if cell.thinking else "closed"
    functions: list[dict[str, Any]] = [
        {"name": name, "description": "x", "parameters": schema} for name, schema in SCHEMAS.items()
    ]
    if cell.request.strict:
        functions[1]["strict"] = True
    named = {"type": "function", "function": {"name": PARIS[0]}}
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": named if cell.request.choice == "named" else cell.request.choice,
        "chat_template_kwargs": {"opening": f"{cell.format}-{state}"},
    }
    if cell.request.structure:
        form = {"name": "answer", "schema": ANSWER}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if cell.streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def ask(server: ScriptedServer, cell: Cell, wish: str) -> Answer:
    """The server's answer to a cell's request, of a model that would say `wish`."""
    world = WORLDS[cell.format]
    server.server_state.formats = find_formats(world.reasoning, cell.format, None)
    server.control.wish = (world.thought(THOUGHT) if cell.thinking else "") + wish
    return server.post(CHAT, body_of(cell))


def check_promise(said: Said, held: Promise) -> None:
    """What holds whatever the model would say."""
    assert len(said.calls) >= held.least_calls
    assert held.most_calls is None or len(said.calls) <= held.most_calls
    assert len({*said.ids}) == len(said.ids) and all(said.ids)
    if held.bound:
        for name, arguments in said.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if held.text == "nothing":
        assert said.text == ""
    if held.text == "structure":
        assert not (said.text and said.calls)
        if not said.calls:
            jsonschema.validate(json.loads(said.text), ANSWER)
    assert said.finish_reason == ("tool_calls" if said.calls else "stop")


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
        check_promise(said, held)
        if cell.request.choice == "named":
            assert said.calls[0][0] == PARIS[0]
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
