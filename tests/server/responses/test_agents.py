"""A request as coding agents send it, at full length: many tools of all kinds, long instructions,
calls beside each other, and the conversation sent back with its reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from jaxllm.server.parsing.formats import find_formats
from jaxllm.tokenizer import Tokenizer
from tests.server import fake
from tests.server.harness import Running
from tests.server.responses.conftest import prompt_of

WORDS = "Keep to the conventions of the repository. "
RUN = {
    "type": "function",
    "name": "run",
    "description": "Runs a command. " + WORDS * 20,
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/s'}
TOOLS = [
    *(RUN | {"name": name} for name in ("run", *(f"tool_{number}" for number in range(19)))),
    {"type": "custom", "name": "apply_patch", "description": WORDS, "format": GRAMMAR},
    {"type": "namespace", "name": "mcp__docs__", "description": WORDS, "tools": [RUN]},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
]
FIRST = """<think>
Look, and patch.
</think>

I look.
<tool_call>
{"name": "run", "arguments": {"cmd": "ls"}}
</tool_call>
<tool_call>
{"name": "mcp__docs__run", "arguments": {"cmd": "find"}}
</tool_call>
<tool_call>
{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+x"}}
</tool_call>"""


@pytest.fixture
def agents(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server with a long context."""
    monkeypatch.setattr(fake, "RESOLVED", replace(fake.RESOLVED, max_model_len=200_000))
    with Running(tokenizer) as server:
        server.server_state.formats = find_formats("qwen3", "hermes", None)
        yield server


def test_an_agent_finishes_a_task_with_calls_of_every_kind(agents: Running):
    told = [{"type": "input_text", "text": WORDS * 1500}]  # 15,000 tokens of a usual vocabulary
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": told},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
    ]
    body = {
        "model": "fake",
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "extra_body": {"client_metadata": {"thread": "1"}},
    }
    agents.control.pieces = [FIRST[at : at + 7] for at in range(0, len(FIRST), 7)]
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(**body, input=items) as stream:
            first = stream.get_final_response()
        thought, text, *calls = first.output
        assert (thought.summary[0].text, text.content[0].text) == ("Look, and patch.", "I look.")
        assert [(one.type, one.name) for one in calls] == [
            ("function_call", "run"),
            ("function_call", "run"),
            ("custom_tool_call", "apply_patch"),
        ]
        assert [json.loads(one.arguments)["cmd"] for one in calls[:2]] == ["ls", "find"]
        assert (calls[1].namespace, calls[2].input) == ("mcp__docs__", "*** Begin\n+x")
        items += [item.to_dict() for item in first.output]
        for one in calls:
            kind = one.type + "_output"
            items.append({"type": kind, "call_id": one.call_id, "output": f"done {one.name}"})
        agents.control.pieces = ["All ", "done."]
        with client.responses.stream(**body, input=items) as stream:
            assert stream.get_final_response().output_text == "All done."
    prompt = prompt_of(agents)
    assert prompt.count("<|im_start|>system") == 1
    assert 'I look.[run {"cmd": "ls"}][mcp__docs__run {"cmd": "find"}][apply_patch' in prompt
    assert prompt.count("done run") == 2 and "done apply_patch" in prompt
    assert agents.server_state.edge_metrics.unknown_fields == 0
