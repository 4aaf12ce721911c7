"""Clients as Claude Code and Codex are get through an overflow with what the server tells them: the
numbers of a refusal, its code, usage, and the size of the context."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.clients.agent_server import AgentServer
from tests.clients.said import Said, shown_tools, written

ROOM = 1500  # tokens
ROWS = "\n".join(map(str, range(150)))  # a result of some 500 tokens
STEPS = 6
SUMMARY = "Sum up what was done."
PARAMETERS = {
    "type": "object",
    "properties": {"step": {"type": "string"}},
    "required": ["step"],
}
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


class Task:
    """Steps that the model has run one after the other."""

    def __init__(self) -> None:
        self.done = 0
        self.summaries = 0

    def answer(self, prompt: str) -> str:
        """The model: the next step, a summary where it is asked for one, or the end."""
        if SUMMARY in prompt.rpartition("<|im_start|>user")[2]:
            self.summaries += 1
            return f"{self.done} steps are done."
        if self.done == STEPS:
            return "All is done."
        call = ("run", {"step": str(self.done)})
        return written(Said("", "", [call]), "hermes", shown_tools(prompt))

    def run(self) -> str:
        """The tool."""
        self.done += 1
        return ROWS


def through_messages(server: AgentServer, task: Task) -> str:
    """Claude Code: it shortens its conversation when it is refused as Anthropic refuses."""
    tools = [{"name": "run", "description": "Run a step.", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "Run every step."}]

    def ask(conversation: list[Any]) -> Any:
        body = {"model": "demo", "max_tokens": 50, "messages": conversation, "tools": tools}
        return server.post("/v1/messages", body)

    while True:
        reply = ask(messages)
        if reply.status == 400:
            found = TOO_LONG.fullmatch(reply.json()["error"]["message"])
            assert found is not None and int(found[1]) > int(found[2])
            asked = ask([*messages[:-2], {"role": "user", "content": SUMMARY}])
            summary = asked.json()["content"][-1]["text"]
            messages = [{"role": "user", "content": f"{summary} Go on."}, *messages[-2:]]
            continue
        blocks = reply.json()["content"]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not calls:
            return str(blocks[-1]["text"])
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": task.run()}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def through_responses(server: AgentServer, task: Task) -> str:
    """Codex: it counts, and compacts before what the size of the context does not hold."""
    window = server.get("/v1/models").json()["data"][0]["max_model_len"]
    tools = [{"type": "function", "name": "run", "parameters": PARAMETERS}]
    start: list[Any] = [{"role": "user", "content": "Run every step."}]
    items = start
    while True:
        body = {"model": "demo", "input": items, "tools": tools, "store": False}
        counted = server.post("/v1/responses/input_tokens", body).json()["input_tokens"]
        if counted >= window:
            assert server.post("/v1/responses", body).error["code"] == "context_length_exceeded"
            told = [*items[:-2], {"role": "user", "content": SUMMARY}]
            reply = server.post("/v1/responses", body | {"input": told}).json()
            summary = reply["output"][-1]["content"][0]["text"]
            items = [*start, {"role": "user", "content": summary}, *items[-2:]]
            continue
        reply = server.post("/v1/responses", body).json()
        assert reply["usage"]["input_tokens"] == counted
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        if not calls:
            return str(reply["output"][-1]["content"][0]["text"])
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": task.run()}
            for call in calls
        ]
        items = [*items, *calls, *results]


def finish(client: Callable[[AgentServer, Task], str]) -> None:
    """The client runs all steps, and has the conversation summed up on the way."""
    task = Task()
    with AgentServer(task.answer, ROOM) as server:
        assert client(server, task) == "All is done."
    assert task.done == STEPS
    assert 1 <= task.summaries < STEPS


def test_a_client_like_claude_code_gets_through_an_overflow() -> None:
    finish(through_messages)


def test_a_client_like_codex_gets_through_an_overflow() -> None:
    finish(through_responses)
