"""Long integers of calls that came as objects. JSON of a body is read with numbers of 64 bits,
which is what every other field needs."""

from __future__ import annotations

from typing import Any

import msgspec

_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)  # all digits as one
_LONG = b"0" * 19  # digits of the first integer that has no 64 bits with a sign


def may_hold_long(raw: bytes) -> bool:
    """Whether JSON has digits enough for an integer of more than 64 bits."""
    return raw.translate(_DIGITS).find(_LONG) >= 0


def keep_digits(messages: Any, raw: bytes) -> None:
    """Put integers of more than 64 bits into the arguments of calls again, in place.

    Args:
        messages: of a chat, in the form of OpenAI or of Anthropic, as read.
        raw: JSON of these messages.
    """
    if not isinstance(messages, list):
        return
    try:
        exact = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # a number that is no double
        return
    for message, exact_message in zip(messages, exact, strict=True):
        if not isinstance(message, dict):
            continue
        for name in ("tool_calls", "content"):
            items = message.get(name)
            if isinstance(items, list):
                for item, source in zip(items, exact_message[name], strict=True):
                    _copy_arguments(item, source)


def _copy_arguments(item: Any, source: Any) -> None:
    """Arguments of one call, or of a block that is one."""
    if not isinstance(item, dict):
        return
    if isinstance(item.get("input"), dict):
        item["input"] = source["input"]
    function = item.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
        function["arguments"] = source["function"]["arguments"]
