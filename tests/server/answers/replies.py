"""What a chat's reply says, whole or streamed; its shape is checked on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.server.harness import Answer


@dataclass
class Said:
    """The answer of one choice.

    Attributes:
        calls: name and text of the arguments.
        reasoning_tokens: None where the usage has no details.
    """

    thought: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    def count(self, usage: dict[str, Any]) -> None:
        """Read the usage."""
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        self.prompt_tokens = usage["prompt_tokens"]
        self.completion_tokens = usage["completion_tokens"]
        details = usage.get("completion_tokens_details") or {}
        self.reasoning_tokens = details.get("reasoning_tokens")


def whole(answer: Answer) -> Said:
    """A whole reply."""
    assert answer.status == 200, answer.body
    body = answer.json()
    (choice,) = body["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert message["role"] == "assistant"
    assert message.get("reasoning") == message.get("reasoning_content")
    assert all(call["type"] == "function" for call in calls)
    assert message["content"] is not None or calls or message.get("reasoning")
    said = Said(
        thought=message.get("reasoning") or "",
        text=message["content"] or "",
        calls=[[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        ids=[call["id"] for call in calls],
        finish_reason=choice["finish_reason"],
    )
    said.count(body["usage"])
    return said


def streamed(answer: Answer) -> Said:
    """A stream, put together as clients do."""
    assert answer.status == 200, answer.body
    *events, last = answer.events()
    said = Said()
    assert last["choices"] == []
    said.count(last["usage"])
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"]["role"] == "assistant"
    for choice in choices:
        delta = choice["delta"]
        assert not said.finish_reason, "nothing comes behind the reason of the end"
        assert delta.get("reasoning") == delta.get("reasoning_content")
        said.thought += delta.get("reasoning") or ""
        said.text += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            _add_call(said, part)
        said.finish_reason = choice["finish_reason"] or ""
    return said


def _add_call(said: Said, part: dict[str, Any]) -> None:
    """A fragment of a call: the first has id and name, later ones only arguments."""
    function = part["function"]
    if part["index"] == len(said.calls):
        assert part["type"] == "function"
        said.ids.append(part["id"])
        said.calls.append([function["name"], ""])
    else:
        assert part["index"] == len(said.calls) - 1, "calls come one after another"
        assert part.keys() == {"index", "function"} and function.keys() == {"arguments"}
    said.calls[-1][1] += function.get("arguments", "")
