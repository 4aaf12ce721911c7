"""Coding agents finish a task of two tool calls; what they send is what `bodies` were made of."""

from __future__ import annotations

import pathlib

import pytest

from tests.clients.agent_server import AgentServer
from tests.clients.agents import AGENTS, Agent
from tests.clients.environments import need
from tests.clients.said import Said, shown_tools, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_runs_two_tools_and_ends(agent: Agent, tmp_path: pathlib.Path) -> None:
    need("npm", "view", agent.package, "version")
    agent.install(tmp_path)
    calls = [agent.call("echo one > first"), agent.call("echo two > second")]

    def answer(prompt: str) -> str:
        tools = shown_tools(prompt)
        if agent.tool not in tools:  # a title, a summary
            return "A task"
        done = prompt.count("<tool_response>")
        if done < len(calls):
            return written(Said("One more.", "", [calls[done]]), "hermes", tools)
        return "Both are written."

    with AgentServer(answer) as server:
        ended = agent.ask(tmp_path, server.url)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Both are written." in ended.stdout
    assert (tmp_path / "work" / "first").read_text() == "one\n"
    assert (tmp_path / "work" / "second").read_text() == "two\n"
    assert sum(agent.tool in shown_tools(prompt) for prompt in server.prompts) == 3
