"""Messages of content blocks to messages of chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.fields import read_field

# A client's line of accounting that differs in every request: it would keep prefixes from matching
BILLING = "x-anthropic-billing-header"

type Block = dict[str, Any]
type Message = dict[str, Any]


def read_conversation(body: dict[str, Any]) -> list[Message]:
    """`system` and `messages` in the form of an OpenAI chat. Neighbours of one role are one
    message, as the protocol has it. Raises ApiError(400)."""
    messages = (*_read_system(body.get("system")), *_read_messages(body.get("messages")))
    conversation: list[Message] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        neighbours = list(group)
        if role == "tool":  # each answers a call of its own
            conversation += neighbours
        else:
            conversation.append(_joined(role, neighbours))
    return conversation


def _read_system(value: Any) -> list[Message]:
    """The system prompt, a text or text blocks, as at most one message."""
    if value is None:
        return []
    texts = [_text(block, place) for place, block in _blocks(value, "system")]
    text = "\n".join(text for text in texts if not text.startswith(BILLING))
    if text:
        return [{"role": "system", "content": text}]
    return []


def _read_messages(value: Any) -> Iterator[Message]:
    """The messages; one with results of tools becomes several."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages is required: a list of messages that is not empty", "messages")
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for number, message in enumerate(value):
        place = f"messages.{number}"
        if not isinstance(message, dict):
            raise bad_request(f"{place} must be an object, got {describe(message)}", place)
        role = message.get("role")
        if not isinstance(role, str) or role not in READERS:
            raise bad_request(
                f"{place}.role must be one of {', '.join(READERS)}, got {describe(role)}",
                f"{place}.role",
            )
        yield from READERS[role](message.get("content"), f"{place}.content", names)


def _joined(role: str, neighbours: list[Message]) -> Message:
    """One message in place of several."""
    joined: Message = {"role": role, "content": ""}
    for name in ("content", "reasoning_content"):
        texts = [text for message in neighbours if (text := message.get(name))]
        if texts:
            joined[name] = "\n".join(texts)
    calls = [call for message in neighbours for call in message.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _system(content: Any, place: str, names: dict[str, str]) -> Iterator[Message]:
    text = "\n".join(_text(block, where) for where, block in _blocks(content, place))
    yield {"role": "system", "content": text}


def _user(content: Any, place: str, names: dict[str, str]) -> Iterator[Message]:
    """Texts and results of tools, in their order."""
    texts: list[str] = []
    sent = False
    for where, block in _blocks(content, place):
        if block.get("type") != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            yield {"role": "user", "content": "\n".join(texts)}
            texts = []
        yield _result(block, where, names)
        sent = True
    if texts or not sent:
        yield {"role": "user", "content": "\n".join(texts)}


def _result(block: Block, place: str, names: dict[str, str]) -> Message:
    """The result of a call, with the name of the tool, which some templates show."""
    id = _string(block, "tool_use_id", place)
    value = block.get("content")
    inner = () if value is None else _blocks(value, f"{place}.content")
    text = "\n".join(_text(part, where) for where, part in inner)
    if read_field({f"{place}.is_error": block.get("is_error")}, f"{place}.is_error", bool, False):
        text = f"Error: {text}"
    message = {"role": "tool", "tool_call_id": id, "content": text}
    return message | ({"name": names[id]} if id in names else {})


def _assistant(content: Any, place: str, names: dict[str, str]) -> Iterator[Message]:
    """Texts, thoughts and calls of an earlier answer. Redacted thoughts are another server's."""
    texts = []
    thoughts = []
    calls = []
    for where, block in _blocks(content, place):
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                id = _string(block, "id", where)
                name = _string(block, "name", where)
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise bad_request(
                        f"{where}.input must be an object, got {describe(arguments)}", where
                    )
                names[id] = name
                function = {"name": name, "arguments": arguments}
                calls.append({"id": id, "type": "function", "function": function})
            case _:
                texts.append(_text(block, where))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


READERS = {"user": _user, "assistant": _assistant, "system": _system}


def _blocks(content: Any, place: str) -> Iterator[tuple[str, Block]]:
    """The blocks of a content with their places; a text is one block."""
    if isinstance(content, str):
        yield place, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise bad_request(
            f"{place} must be a string or a list of blocks, got {describe(content)}", place
        )
    for number, block in enumerate(content):
        where = f"{place}.{number}"
        if not isinstance(block, dict):
            raise bad_request(f"{where} must be an object, got {describe(block)}", where)
        yield where, block


def _text(block: Block, place: str) -> str:
    """The text of a block that must be a text."""
    if block.get("type") != "text":
        raise bad_request(
            f"{place} is a block of type {describe(block.get('type'))}, which this model does not "
            "take here; send text",
            place,
        )
    return _string(block, "text", place)


def _string(block: Block, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(
            f"{place}.{name} must be a string, got {describe(value)}", f"{place}.{name}"
        )
    return value
