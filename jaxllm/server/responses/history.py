"""Conversations as they are stored and shortened."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import orjson

from jaxllm.server.errors import OVERFLOW, ApiError
from jaxllm.server.requests.limits import MAX_MESSAGES
from jaxllm.server.requests.messages import count_chars
from jaxllm.server.responses.items import Item
from jaxllm.server.responses.output_items import new_id
from jaxllm.server.responses.store import Encoded

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
    "additional_tools": "at",
}
ANSWER_SHARE = 8  # of the context, one part of so many is left for an answer without a limit

type Message = dict[str, Any]


def encode(item: Item) -> Encoded:
    """An item as it is stored and listed: with an id, a status and parts."""
    whole: dict[str, Any] = {"id": None, "status": "completed"} | item
    if not isinstance(whole["id"], str):
        whole["id"] = new_id(PREFIXES[item["type"]])
    if item["type"] == "message" and isinstance(item["content"], str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            part |= {"type": "output_text", "annotations": []}
        whole["content"] = [part]
    return whole["id"], orjson.dumps(whole)


class Shortened(Sequence[list[Message]]):
    """The messages without ever more of the oldest. Leading instructions stay, a message of the
    user to begin with, and the last `after`. The result of a call never stands without it."""

    def __init__(self, messages: list[Message], after: int = 0):
        roles = [message["role"] for message in messages]
        end = len(messages) - after
        first = next((number for number, role in enumerate(roles[:end]) if role != "system"), end)
        users = [number for number, role in enumerate(roles[:end]) if role == "user"]
        if users:
            last = users[-1]
        else:
            last = first
        head = messages[:first]
        begun = messages[:first] + messages[last:end][:1]
        self._messages = messages
        # What stands before the messages from a place on
        self._cuts: list[tuple[list[Message], int]] = [([], 0)]
        self._cuts += [(head, number) for number in users if number > first]
        self._cuts += [
            (begun, number) for number in range(last + 2, len(roles)) if roles[number] != "tool"
        ]

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, number: Any) -> Any:
        before, rest = self._cuts[number]
        return before + self._messages[rest:]


def clipped(messages: list[Message], max_chars: int, after: int) -> list[Message]:
    """As many of the latest messages as a chat takes; those that `Shortened` keeps in any case."""
    shorter = Shortened(messages, after)
    fits = lambda chat: len(chat) <= MAX_MESSAGES and count_chars(chat) <= max_chars
    return list(shorter[min(bisect_left(shorter, True, key=fits), len(shorter) - 1)])


async def fitting(
    shorter: Shortened, room: int, render: Callable[[list[Message]], Coroutine[Any, Any, list[int]]]
) -> list[int]:
    """The token ids of the first of `shorter` that `room` tokens hold, else of the last. Raises
    what `render` does for these."""
    low = 0
    high = len(shorter) - 1
    number = 0
    best: list[int] | None = None
    while low <= high:
        try:
            ids = await render(shorter[number])
            fits = len(ids) <= room
        except ApiError as error:
            if error.code != OVERFLOW:
                raise
            fits = False
        if fits:
            best = ids
            high = number - 1
        else:
            low = number + 1
        number = (low + high) // 2
    if best is None:
        return await render(shorter[-1])
    return best


def room_for_prompt(context: int, max_tokens: int | None) -> int:
    """Tokens of a truncated prompt: the rest of the context is for the answer."""
    if max_tokens is None:
        wanted = context // ANSWER_SHARE
    else:
        wanted = max_tokens
    return context - min(wanted, context // 2)
