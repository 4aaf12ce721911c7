"""Requests of coding agents, at their full length, get what the model says through every API.

Their bodies were recorded from the agents; texts are filler of the same length (`reshape.py`).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.parsing.registry import tool_formats
from tests.clients.agent_server import AgentServer
from tests.clients.reshape import expanded, filler, numbered, shape
from tests.clients.said import TEXT, Said, plain_calls, read, shown_tools, written

BODIES = {path.stem: path for path in pathlib.Path(__file__).with_name("bodies").glob("*.json")}
CASES = {
    "a reply": (Said(reply=TEXT), 0),
    "a thought and a reply": (Said("Hm.", TEXT), 0),
    "one call": (Said(), 1),
    "parallel calls": (Said(), 2),
    "a thought, a reply and parallel calls": (Said("Hm.\nSo.", TEXT.strip()), 2),
}
RESULTS = ("tool_result", "function_call_output", "tool")  # types and the role of tool results
ONE_CALL = {"glm4"}  # formats of one call an output


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    """A server with room for the prompts."""
    with AgentServer(lambda prompt: "") as running:
        yield running


def answered(server: AgentServer, name: str, said: Said, calls: int, format: str) -> None:
    """Replay one body, streamed and whole: the client reads what the model wrote."""
    wanted = Said(said.thought, said.reply)
    found = expanded(json.loads(BODIES[name].read_text()))
    if found["body"].get("parallel_tool_calls") is False:
        calls = min(calls, 1)

    def answer(prompt: str) -> str:
        tools = shown_tools(prompt)
        wanted.calls = plain_calls(tools, calls)
        assert len(wanted.calls) == calls
        return written(wanted, format, tools)

    server.answer = answer
    server.server_state.formats = find_formats(
        "gpt_oss" if format == "gpt_oss" else "qwen3", format, None
    )
    for stream in (True, False):
        options = {"stream": stream} | ({} if stream else {"stream_options": None})
        body = json.dumps(found["body"] | options).encode()
        reply = server.request("POST", found["path"], body, found["headers"])
        assert reply.status == 200, reply.body[:1000]
        assert read(found["path"], reply.body, stream) == wanted


@pytest.mark.parametrize("name", BODIES)
def test_an_agent_gets_every_kind_of_answer(server: AgentServer, name: str) -> None:
    for said, calls in CASES.values():
        answered(server, name, said, calls, "hermes")


@pytest.mark.slow
@pytest.mark.parametrize("format", sorted(tool_formats()))
@pytest.mark.parametrize("name", BODIES)
def test_an_agent_gets_calls_of_every_format(server: AgentServer, name: str, format: str) -> None:
    for calls in (1,) if format in ONE_CALL else (1, 2):
        answered(server, name, Said("Hm."), calls, format)


@pytest.mark.parametrize("name", BODIES)
def test_the_model_sees_the_whole_request(server: AgentServer, name: str) -> None:
    server.answer = lambda prompt: "Fine."
    found = expanded(json.loads(BODIES[name].read_text()))
    assert server.request("POST", found["path"], json.dumps(found["body"]).encode()).status == 200
    prompt = server.prompts[-1]
    said = {name: value for name, value in found["body"].items() if name != "tools"}
    assert max(texts(said), key=len) in prompt
    assert len(shown_tools(prompt)) >= 9
    results = sum(value in RESULTS for value in texts(found["body"]))
    assert prompt.count("<tool_response>") == results


def texts(value: Any) -> Iterator[str]:
    """Every text in a body."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for member in value.values() if isinstance(value, dict) else value:
            yield from texts(member)


def test_the_bodies_are_as_large_as_agents_send_them() -> None:
    sizes = {
        name: len(json.dumps(expanded(json.loads(p.read_text())))) for name, p in BODIES.items()
    }
    assert max(sizes.values()) > 75_000
    largest = json.loads(BODIES["claude_code"].read_text())["body"]
    assert len(largest["tools"]) >= 20


def test_a_shape_has_no_text_and_its_length() -> None:
    body = {
        "role": "user",
        "content": "secret",
        "arguments": '{"command": "ls"}',
        "input": {"n": 1},
    }
    made = shape(body)
    assert "secret" not in json.dumps(made) and "ls" not in made["arguments"]
    assert expanded(made)["content"] == filler(6)
    assert expanded(made)["input"] == {"n": 1} and expanded(made)["role"] == "user"
    assert len(json.loads(expanded(made)["arguments"])["command"]) == 2


def test_ids_are_numbered() -> None:
    first, second = "01a2065c-1a46-7711-b446-ecb985cde9d9", "ffa2065c-1a46-7711-b446-ecb985cde9d9"
    made = numbered(f"msg_{first} {second} fc_{first}")
    numbers = [f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2)]
    assert made == f"msg_{numbers[0]} {numbers[1]} fc_{numbers[0]}"
