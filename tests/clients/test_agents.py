"""Coding agents finish a task of two tool calls, also through an overflow of the context; what they
send is what `bodies` were made of."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests.clients.agent_server import AgentServer
from tests.clients.agents import AGENTS, Agent
from tests.clients.environments import need
from tests.clients.said import Said, shown_tools, written

CODEX, CLAUDE, OPENCODE = AGENTS
SUMMARY = "<summary>One is written into first, and two into second.</summary>"

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


def script(agent: Agent, work: pathlib.Path) -> Callable[[str], str]:
    """A model that writes two files with long results, and sums up what it is told to sum up."""

    def answer(prompt: str) -> str:
        tools = shown_tools(prompt)
        asked = prompt.rpartition("<|im_start|>user")[2]
        if agent.tool not in tools or "detailed summary" in asked:
            return SUMMARY if "summary" in asked else "A task"
        for word, name in (("one", "first"), ("two", "second")):
            if not (work / name).exists():
                call = agent.call(f"echo {word} > {name}; seq 1 {agent.rows}")
                return written(Said("One more.", "", [call]), "hermes", tools)
        return "Both are written."

    return answer


def refusals(server: AgentServer) -> int:
    """Requests that were refused."""
    lines = server.get("/metrics").body.decode().splitlines()
    return int(
        sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("vllm:admission_rejections_total")
        )
    )


@pytest.mark.parametrize("agent", [CLAUDE, OPENCODE], ids=lambda agent: agent.name)
def test_an_agent_that_is_refused_compacts_its_conversation_and_ends(
    agent: Agent, tmp_path: pathlib.Path
) -> None:
    need("npm", "view", agent.package, "version")
    agent.install(tmp_path)
    with AgentServer(script(agent, tmp_path / "work"), agent.room) as server:
        ended = agent.ask(tmp_path, server.url)  # it takes the context for longer
        assert refusals(server) == 1
    assert "Both are written." in ended.stdout, ended.stdout + ended.stderr
    # opencode ends with 1 after any error, also if it went on
    assert ended.returncode == 0 or agent is OPENCODE
    assert SUMMARY.partition(">")[2].partition("<")[0] in server.prompts[-1]


@pytest.mark.parametrize("agent", [CODEX, OPENCODE], ids=lambda agent: agent.name)
def test_an_agent_that_is_told_of_the_context_compacts_before_it_is_refused(
    agent: Agent, tmp_path: pathlib.Path
) -> None:
    need("npm", "view", agent.package, "version")
    agent.install(tmp_path)
    with AgentServer(script(agent, tmp_path / "work")) as server:
        ended = agent.ask(tmp_path, server.url, agent.room)
        assert refusals(server) == 0
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Both are written." in ended.stdout
    assert SUMMARY in server.prompts[-1] or "One is written into first" in server.prompts[-1]
