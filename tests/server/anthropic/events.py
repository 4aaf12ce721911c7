"""Reading the replies of /v1/messages."""

from __future__ import annotations

import json
from typing import Any

from jaxllm.server.parsing.formats import find_formats
from tests.server.harness import Answer, Running
from tests.server.parsing.samples import TOOLS

PATH = "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
CUSTOM = [
    {"name": name, "description": "x", "input_schema": schema} for name, schema in TOOLS.items()
]
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": USER}


def script(server: Running, text: str, size: int = 3, tools: str = "hermes") -> None:
    """Let the model write this text, in pieces, and the server read it."""
    server.server_state.formats = find_formats("qwen3", tools, None)
    server.control.pieces = [text[at : at + size] for at in range(0, len(text), size)]


def whole(server: Running, **more: Any) -> dict[str, Any]:
    """The whole reply."""
    answer = server.post(PATH, BODY | more)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each of which names its type twice."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for piece in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(server: Running, **more: Any) -> dict[str, Any]:
    """The message that a client makes of a stream, whose grammar is checked."""
    return collected(events(server.post(PATH, BODY | {"stream": True} | more)))


def collected(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that these events make: blocks begin, grow and end one after the other."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    open_index = None
    for event in found:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
            case "content_block_start":
                assert open_index is None and event["index"] == len(message["content"])
                open_index = event["index"]
                message["content"].append(event["content_block"])
                texts = []
            case "content_block_delta":
                assert open_index == event["index"]
                grow(message["content"][open_index], event["delta"], texts)
            case "content_block_stop":
                assert open_index == event["index"]
                open_index = None
                block = message["content"][-1]
                if block["type"] == "tool_use" and texts:
                    block["input"] = json.loads("".join(texts))
            case "message_delta":
                assert open_index is None
                message |= event["delta"] | {"usage": event["usage"]}
    assert found[-1]["type"] == "message_stop"
    return message


def grow(block: dict[str, Any], delta: dict[str, Any], texts: list[str]) -> None:
    """Add a delta to its block; arguments are gathered in `texts`."""
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta":
            assert block["type"] == "tool_use"
            texts.append(delta["partial_json"])
        case other:
            raise AssertionError(other)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two equal requests."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    rest = {name: value for name, value in message.items() if name not in ("id", "usage")}
    counts = {k: v for k, v in message["usage"].items() if "input" not in k}
    return rest | {"content": content, "usage": counts}
