"""Asking a scripted model what a cell of the matrix asks, and what holds of the answer."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from jaxllm.server.parsing.formats import find_formats
from tests.server.answers.replies import Said
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import WORLDS, Call
from tests.server.harness import Answer
from tools.answer_matrix import Cell, Promise, promise

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
PARIS: Call = ("get_weather", {"city": "Saint-Denis é", "days": 3, "unit": "celsius"})


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


def ask(server: ScriptedServer, cell: Cell, wish: str, **options: Any) -> Answer:
    """The server's answer to a cell's request, of a model that would say `wish`."""
    world = WORLDS[cell.format]
    server.server_state.formats = find_formats(world.reasoning, cell.format, None)
    server.control.wish = (world.thought(THOUGHT) if cell.thinking else "") + wish
    return server.post(CHAT, body_of(cell) | options)


def check_promise(said: Said, cell: Cell) -> None:
    """What holds of an answer that ended by itself, whatever the model would say."""
    held: Promise = promise(cell.format, cell.request)
    assert len(said.calls) >= held.least_calls
    assert held.most_calls is None or len(said.calls) <= held.most_calls
    assert len({*said.ids}) == len(said.ids) and all(said.ids)
    if cell.request.choice == "named":
        assert said.calls[0][0] == PARIS[0]
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
