"""Input items of /v1/responses as the messages of a chat.

Items that an answer is made of (reasoning, text, calls) become one message of the assistant again.
Leading instructions become one system message: many templates take no second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from jaxllm.server.errors import OVERFLOW, ApiError, bad_request, describe
from jaxllm.server.responses.sealed import unseal
from jaxllm.server.responses.tools import INPUT, Tools, joined_name, read_name

MAX_ITEMS = 8192
ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "reasoning_text": "text",
}
SUMMARY = "Summary of the conversation before this point:\n\n"
SUMMARISE = (
    "Summarise our conversation so far for whoever continues it without having read it: the goals, "
    "what was decided and done, names, numbers and paths that matter, what failed, and what is "
    "left to do. Write the summary alone."
)

type Item = dict[str, Any]


def read_input(value: Any) -> list[Item]:
    """The request's input as items, each with a type. Raises ApiError(400)."""
    if value is None:
        return []
    if isinstance(value, str):
        part = {"type": "input_text", "text": value}
        return [{"type": "message", "role": "user", "content": [part]}]
    if not isinstance(value, list):
        raise bad_request(
            f"input must be a string or a list of items, got {describe(value)}", "input"
        )
    if len(value) > MAX_ITEMS:
        raise bad_request(
            f"input takes at most {MAX_ITEMS} items, got {len(value)}; "
            "the prompt is too long: shorten it",
            "input",
            OVERFLOW,
        )
    return [_typed(item, f"input[{number}]") for number, item in enumerate(value)]


def _typed(item: Any, place: str) -> Item:
    """The item with its type, which messages and references may leave out."""
    if not isinstance(item, dict):
        raise bad_request(f"{place} must be an object, got {describe(item)}", place)
    item_type = item.get("type")
    if item_type is None:
        if "role" in item:
            item_type = "message"
        elif "id" in item:
            item_type = "item_reference"
    if item_type == "compaction_summary":  # the older name
        item_type = "compaction"
    if not isinstance(item_type, str) or item_type not in KNOWN:
        fault = "has no type"
        if item_type is not None:
            fault = f"is of type {describe(item_type)}"
        raise bad_request(f"{place} {fault}; this server takes {', '.join(sorted(KNOWN))}", place)
    return item | {"type": item_type}


class Chat:
    """The messages that items make, in the form of /v1/chat/completions.

    Attributes:
        tools: tools that items add to the request's.
    """

    def __init__(self, instructions: str | None, tools: Tools):
        self._instructions = [instructions] if instructions else []  # that lead
        self._messages: list[dict[str, Any]] = []  # after them
        self.tools = tools

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        if not self._instructions:
            return self._messages
        return [{"role": "system", "content": "\n\n".join(self._instructions)}, *self._messages]

    def add(self, item: Item, place: str) -> None:
        """Add one more item; `place` is where it is in the body, for errors. Raises
        ApiError(400)."""
        KNOWN[item["type"]](self, item, place)

    def summarise(self) -> None:
        """Ask for a summary in place of an answer."""
        self._messages.append({"role": "user", "content": SUMMARISE})
        self.tools.functions = []
        self.tools.places = []

    def _message(self, item: Item, place: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise bad_request(
                f"{place}.role must be one of {', '.join(ROLES)}, got {describe(role)}",
                f"{place}.role",
            )
        text = read_text(item.get("content"), f"{place}.content")
        if role == "assistant":
            self._assistant("content")["content"] = text
        elif role == "user" or self._messages:
            self._messages.append({"role": "user" if role == "user" else "system", "content": text})
        else:
            self._instructions.append(text)

    def _reasoning(self, item: Item, place: str) -> None:
        """Its content, what was sealed, or its summary. Reasoning that only another server can
        read is left out: a conversation goes on without it."""
        sealed = item.get("encrypted_content")
        text = (
            read_text(item.get("content") or "", f"{place}.content")
            or (unseal(sealed) if isinstance(sealed, str) else None)
            or read_text(item.get("summary") or "", f"{place}.summary")
        )
        if text:
            self._assistant("reasoning_content")["reasoning_content"] = text

    def _function_call(self, item: Item, place: str) -> None:
        text = item.get("arguments")
        if not isinstance(text, str):
            raise bad_request(
                f"{place}.arguments must be a string, got {describe(text)}", f"{place}.arguments"
            )
        self._call(item, place, text)

    def _custom_call(self, item: Item, place: str) -> None:
        text = item.get("input")
        if not isinstance(text, str):
            raise bad_request(
                f"{place}.input must be a string, got {describe(text)}", f"{place}.input"
            )
        self._call(item, place, orjson.dumps({INPUT: text}).decode())

    def _call(self, item: Item, place: str, arguments: str) -> None:
        """A call of the assistant's last message."""
        name = joined_name(read_name(item, place), item.get("namespace"))
        call = {"id": _call_id(item, place), "type": "function"}
        calls = self._assistant("tool_calls").setdefault("tool_calls", [])
        calls.append(call | {"function": {"name": name, "arguments": arguments}})

    def _output(self, item: Item, place: str) -> None:
        text = read_text(item.get("output"), f"{place}.output")
        message = {"role": "tool", "tool_call_id": _call_id(item, place), "content": text}
        self._messages.append(message)

    def _compaction(self, item: Item, place: str) -> None:
        sealed = item.get("encrypted_content")
        text = None
        if isinstance(sealed, str):
            text = unseal(sealed)
        if text is None:
            raise bad_request(
                f"{place}.encrypted_content was not made by this server; "
                "send the items it stands for",
                f"{place}.encrypted_content",
                "invalid_encrypted_content",
            )
        self._messages.append({"role": "user", "content": SUMMARY + text})

    def _additional_tools(self, item: Item, place: str) -> None:
        self.tools.add(item.get("tools"), f"{place}.tools")

    def _misplaced(self, item: Item, place: str) -> None:
        raise bad_request(f"{place} of type {item['type']} must be the last item", place)

    def _unresolved(self, item: Item, place: str) -> None:
        raise missing_item(item, place)

    def _assistant(self, field: str) -> dict[str, Any]:
        """The assistant's message that takes this field: the last one, unless it already has the
        field. A thought begins an answer; text behind calls stands beside them, as in a chat, so
        that nothing comes between them and their results."""
        if self._messages:
            last = self._messages[-1]
        else:
            last = {"role": ""}
        later = {"reasoning_content": ("reasoning_content", "content", "tool_calls")}
        taken = later.get(field, ("content",) if field == "content" else ())
        if last["role"] != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": None}
            self._messages.append(last)
        return last


KNOWN: dict[str, Callable[[Chat, Item, str], None]] = {
    "message": Chat._message,
    "reasoning": Chat._reasoning,
    "function_call": Chat._function_call,
    "function_call_output": Chat._output,
    "custom_tool_call": Chat._custom_call,
    "custom_tool_call_output": Chat._output,
    "compaction": Chat._compaction,
    "additional_tools": Chat._additional_tools,
    "compaction_trigger": Chat._misplaced,
    "item_reference": Chat._unresolved,
}


def missing_item(item: Item, place: str) -> ApiError:
    """The refusal of a reference to an item that is not stored."""
    return ApiError(
        404,
        f"{place} refers to item {describe(item.get('id'))}, which is not stored; "
        "send the item itself",
        param=place,
        code="item_not_found",
    )


def read_text(content: Any, place: str) -> str:
    """A text, or the texts of parts, joined by line breaks. Raises ApiError(400) that names any
    other part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(
            f"{place} must be a string or a list of parts, got {describe(content)}", place
        )
    texts = []
    for number, part in enumerate(content):
        where = f"{place}[{number}]"
        part_type = None
        if isinstance(part, dict):
            part_type = part.get("type")
        if not isinstance(part_type, str) or part_type not in TEXT_PARTS:
            if part_type is None:
                shown = describe(part)
            else:
                shown = f"a part of type {describe(part_type)}"
            raise bad_request(f"{where} is {shown}; this model takes text parts only", where)
        text = part.get(TEXT_PARTS[part_type])
        if not isinstance(text, str):
            raise bad_request(f"{where}.text must be a string, got {describe(text)}", where)
        texts.append(text)
    return "\n".join(texts)


def _call_id(item: Item, place: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise bad_request(
            f"{place}.call_id must be a text, got {describe(call_id)}", f"{place}.call_id"
        )
    return call_id
