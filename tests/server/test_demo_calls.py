"""The built-in model calls tools by itself and answers from their results, in both formats of calls
and over each API, streamed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.said import Said, read
from tests.demo.conversations import BOOK_TABLE, CITIES_ASKED, WEATHER
from tests.server.demo_server import Demo

FUNCTIONS = [tool["function"] for tool in (WEATHER, BOOK_TABLE)]
CALLS: list[tuple[str, dict[str, str]]] = [
    ("get_weather", {"city": "Oslo"}),
    ("get_weather", {"city": "Bern"}),
]
RESULTS = ["3 degrees and snowy", "9 degrees and cloudy"]
ANSWER = "In Oslo it is 3 degrees and snowy. In Bern it is 9 degrees and cloudy."
FORMATS = {
    "json": (),
    "xml": (
        *("--tool-call-parser", "qwen3_coder"),
        *("--default-chat-template-kwargs", '{"tool_format": "xml"}'),
    ),
}

type Done = list[tuple[str, str, dict[str, str], str]]


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest) -> Iterator[Demo]:
    """A server for calls in one format."""
    sizes = ("--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "2048")
    demo = Demo(*sizes, *FORMATS[request.param])
    try:
        yield demo
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


def chat(done: Done) -> dict[str, Any]:
    """The question to /v1/chat/completions. `done` are calls with their ids and results."""
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for id, name, given, _ in done
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": text} for id, _, _, text in done]
    said = [{"role": "assistant", "content": None, "tool_calls": calls}, *results] if done else []
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    return {"messages": [CITIES_ASKED, *said], "tools": tools, "max_tokens": 200}


def responses(done: Done) -> dict[str, Any]:
    """The question to /v1/responses."""
    calls = [
        {"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(given)}
        for id, name, given, _ in done
    ]
    results = [
        {"type": "function_call_output", "call_id": id, "output": text} for id, _, _, text in done
    ]
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    return {"input": [CITIES_ASKED, *calls, *results], "tools": tools, "max_output_tokens": 200}


def messages(done: Done) -> dict[str, Any]:
    """The question to /v1/messages."""
    calls = [
        {"type": "tool_use", "id": id, "name": name, "input": given} for id, name, given, _ in done
    ]
    results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, *_, text in done]
    said = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in FUNCTIONS
    ]
    turns = [CITIES_ASKED, *(said if done else [])]
    return {"messages": turns, "tools": tools, "max_tokens": 200}


APIS: dict[str, Callable[[Done], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", APIS)
def test_the_model_calls_in_parallel_by_itself_and_answers_from_the_results(
    server: Demo, path: str
) -> None:
    def ask(done: Done) -> Said:
        body = APIS[path](done) | {"model": "demo", "temperature": 0, "stream": True}
        request = urllib.request.Request(
            server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as reply:
            return read(path, reply.read(), streamed=True)

    assert ask([]) == Said(calls=CALLS)
    done = [
        (f"call_{i}", name, given, result)
        for i, ((name, given), result) in enumerate(zip(CALLS, RESULTS, strict=True))
    ]
    assert ask(done) == Said(reply=ANSWER)
