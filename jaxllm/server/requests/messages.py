"""The messages of a conversation, which come with known roles and text as content."""

from __future__ import annotations

from itertools import chain
from typing import Any

from jaxllm.server.errors import bad_request, describe, too_many
from jaxllm.server.requests.limits import MAX_MESSAGES, Rules, check_chars
from jaxllm.templates.arguments import check_depth, text_of

MAX_TOOL_CALLS = 128
MAX_ARGUMENT_PARTS = 1 << 18  # commas and brackets of all calls' arguments: < 0.1 s of parsing
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Members of messages that are texts, beside the content
TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
SHOWN_AS = {"reasoning": "reasoning_content"}  # as templates know it


def read_messages(value: Any, rules: Rules, truncated: bool) -> list[dict[str, Any]]:
    """The messages with known roles and text as content. Texts of arguments are parsed where
    templates run. Their prompt may be longer than the context if it is `truncated`. Raises
    ApiError(400)."""
    if not isinstance(value, list):
        must = "is required: a list of messages" if value is None else "must be a list"
        raise bad_request(f"messages {must}", "messages")
    if not value:
        raise bad_request("messages must not be empty", "messages")
    if len(value) > MAX_MESSAGES:
        raise too_many(
            rules.resolved.max_model_len,
            f"at most {MAX_MESSAGES} messages per request are taken, got {len(value)}",
            "messages",
        )
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(value)]
    check_chars(least_chars(messages), rules, "messages", truncated)
    calls = chain.from_iterable(message.get("tool_calls", ()) for message in messages)
    _check_arguments([call["function"] for call in calls])
    return messages


def count_chars(messages: list[dict[str, Any]]) -> int:
    """Characters of the messages' texts."""
    return sum(
        len(text) for message in messages for text in message.values() if isinstance(text, str)
    )


def least_chars(messages: list[dict[str, Any]]) -> int:
    """Characters that the rendered messages have at least: templates leave out earlier reasoning,
    which an answer's text may hold too, and white space at a text's ends."""
    return sum(
        len(message["content"].strip())
        for message in messages
        if message["role"] != "assistant" and isinstance(message["content"], str)
    )


def _read_message(message: Any, place: str) -> dict[str, Any]:
    """One message; `place` is where it stands in the body, for errors."""
    if not isinstance(message, dict):
        raise bad_request(f"{place} must be an object, got {describe(message)}", place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(
            f"{place}.role must be one of {', '.join(ROLES)}, got {describe(role)}", f"{place}.role"
        )
    clean: dict[str, Any] = {"role": ROLES[role]}
    _refuse_lost(message, place)
    calls: list[dict[str, Any]] = []
    if role == "assistant":
        calls = _read_tool_calls(message, place)
    # Tools that have nothing to say send null
    required = role not in ("assistant", "tool")
    clean["content"] = _read_content(message.get("content"), place, required)
    for name in TEXTS:
        text = _read_string(message, name, place)
        if text is not None:
            clean[SHOWN_AS.get(name, name)] = text
    if role == "assistant" and not clean["content"]:
        clean["content"] = _read_string(message, "refusal", place) or ""
    if calls:
        clean["tool_calls"] = calls
    if role == "tool" and "tool_call_id" not in clean:
        raise bad_request(
            f"{place}.tool_call_id is required for a tool message", f"{place}.tool_call_id"
        )
    return clean


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is sent to where templates run. Arguments of calls go as text, in which
    numbers have all their digits. gpt-oss refuses a text beside a thought, which transformers calls
    `thinking` for it, in a message with calls: there the text is the thought."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    sent = message | {"tool_calls": [_as_sent(call) for call in calls]}
    if message.get("reasoning_content") and message["content"]:
        sent["thinking"] = ""
    return sent


def _as_sent(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        return call
    check_depth(function["arguments"])
    return call | {"function": function | {"arguments": text_of(function["arguments"])}}


def _refuse_lost(message: dict[str, Any], place: str) -> None:
    """Refuse members that say something which no template would show."""
    for name, instead in (("function_call", "tool_calls"), ("audio", "its text as content")):
        if message.get(name) is not None:
            where = f"{place}.{name}"
            raise bad_request(
                f"{where} is not supported here; send {instead}", where, "unsupported_parameter"
            )


def _read_string(message: dict[str, Any], name: str, place: str) -> str | None:
    """A member that must be a string or null."""
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(
            f"{place}.{name} must be a string, got {describe(value)}", f"{place}.{name}"
        )
    return value


def _read_content(content: Any, place: str, required: bool) -> str:
    """The text of a message; a list of text parts is joined by line breaks."""
    if isinstance(content, str):
        return content
    if content is None and not required:
        return ""
    if not isinstance(content, list):
        must = "is required" if content is None else "must be a string or a list of parts"
        raise bad_request(f"{place}.content {must}, got {describe(content)}", f"{place}.content")
    texts = []
    for number, part in enumerate(content):
        where = f"{place}.content[{number}]"
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type not in ("text", "refusal"):
            shown = describe(part)
            if part_type is not None:
                shown = f"a part of type {describe(part_type)}"
            raise bad_request(f"{where} is {shown}; this model takes text parts only", where)
        text = part.get(part_type)
        if not isinstance(text, str):
            raise bad_request(f"{where}.{part_type} must be a string, got {describe(text)}", where)
        texts.append(text)
    return "\n".join(texts)


def _read_tool_calls(message: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """The assistant's earlier calls; arguments that are text are not yet parsed."""
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        raise bad_request(
            f"{place}.tool_calls must be a list of at most {MAX_TOOL_CALLS}", f"{place}.tool_calls"
        )
    clean = []
    for number, call in enumerate(calls):
        where = f"{place}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where} must be an object with function.name", where)
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise bad_request(f"{where}.function.arguments must be a JSON object", where)
        clean.append(
            {
                "id": _read_string(call, "id", where),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return clean


def _check_arguments(functions: list[dict[str, Any]]) -> None:
    """Raises ApiError(400) when texts of arguments would take long to parse: the body's own limits
    do not see inside of texts."""
    arguments = [function["arguments"] for function in functions]
    texts = [text for text in arguments if isinstance(text, str)]
    parts = sum(text.count(mark) for text in texts for mark in ",[{")
    if parts > MAX_ARGUMENT_PARTS:
        raise bad_request(
            f"arguments of tool_calls have {parts} parts, the limit is {MAX_ARGUMENT_PARTS}; "
            "send fewer or shorter calls",
            "messages",
        )
