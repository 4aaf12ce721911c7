"""What a model says, as the text of its format and as each API tells it to a client."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jaxllm.server.parsing.registry import tool_formats
from tests.server.anthropic.events import collected
from tests.server.parsing.samples import produced

TEXT = 'See “naïve” `a < b and "c"`:\n'
HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
THOUGHTS = {"gpt_oss": HARMONY}  # formats whose models do not write <think>

type Calls = list[tuple[str, dict[str, str]]]


@dataclass
class Said:
    """An answer: its reasoning, its reply, its calls by name and arguments."""

    thought: str = ""
    reply: str = ""
    calls: Calls = field(default_factory=list)


def written(said: Said, format: str, schemas: dict[str, Any]) -> str:
    """The answer as a model of this format writes it, after an open beginning."""
    parser = tool_formats()[format]
    thought = THOUGHTS.get(format, "<think>\n{}\n</think>\n\n").format(said.thought)
    calls = []
    for number, (name, arguments) in enumerate(said.calls):
        pieces = parser.pieces(name, schemas[name], number)
        calls.append(produced(pieces, iter([arguments]), optional=False))
    section = parser.section
    block = section.begin + section.between.join(calls) + section.end if calls else ""
    return thought * bool(said.thought) + said.reply + block


def shown_tools(prompt: str) -> dict[str, Any]:
    """Schemas by name, as a prompt of the demo's template shows them."""
    lines = [line for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    functions = [json.loads(line)["function"] for line in lines]
    return {function["name"]: function["parameters"] for function in functions}


def plain_calls(tools: dict[str, Any], number: int) -> Calls:
    """Calls of the first tools that need nothing but texts."""
    made: Calls = []
    for name, schema in tools.items():
        kinds = {schema["properties"][key].get("type") for key in schema["required"]}
        if kinds == {"string"}:
            made.append((name, {key: f"{TEXT}{len(made)}" for key in schema["required"]}))
    return made[:number]


def read_message(message: dict[str, Any]) -> Said:
    """An answer of /v1/messages."""
    said = Said()
    for block in message["content"]:
        match block["type"]:
            case "thinking":
                said.thought += block["thinking"]
            case "text":
                said.reply += block["text"]
            case _:
                said.calls.append((block["name"], block["input"]))
    assert message["stop_reason"] == ("tool_use" if said.calls else "end_turn")
    return said


def read_response(response: dict[str, Any]) -> Said:
    """An answer of /v1/responses."""
    said = Said()
    for item in response["output"]:
        name = "__".join(filter(None, (item.get("namespace"), item.get("name"))))
        match item["type"]:
            case "reasoning":
                parts = item["summary"] or item["content"]
                said.thought += "".join(part["text"] for part in parts)
            case "message":
                said.reply += "".join(part["text"] for part in item["content"])
            case "custom_tool_call":
                said.calls.append((name, {"input": item["input"]}))
            case _:
                said.calls.append((name, json.loads(item["arguments"])))
    assert response["status"] == "completed"
    return said


def read_chat(choice: dict[str, Any]) -> Said:
    """An answer of /v1/chat/completions."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return Said(
        message.get("reasoning") or "",
        message.get("content") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def events(body: bytes) -> list[dict[str, Any]]:
    """The data of server-sent events."""
    data = [line.removeprefix("data: ") for line in body.decode().splitlines() if "data: " in line]
    return [json.loads(line) for line in data if line != "[DONE]"]


def joined_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the chunks of a chat make."""
    message: dict[str, Any] = {"reasoning": "", "content": "", "tool_calls": []}
    reason = None
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        reason = choice["finish_reason"] or reason
        for name in ("reasoning", "content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls") or []:
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
            for key, text in call["function"].items():
                message["tool_calls"][call["index"]]["function"][key] += text or ""
    return {"message": message, "finish_reason": reason}


def read(path: str, body: bytes, streamed: bool) -> Said:
    """The answer of any of the three APIs."""
    found: Any = events(body) if streamed else json.loads(body)
    if "/messages" in path:
        return read_message(collected(found) if streamed else found)
    if "/responses" in path:
        return read_response(found[-1]["response"] if streamed else found)
    return read_chat(joined_chunks(found) if streamed else found["choices"][0])
