"""Reading large JSON bodies without holding up the event loop.

Bodies that cannot be legal are refused before they are decoded, which takes ten times as long as
scanning them. Legal bodies are decoded field by field, and other tasks run in between.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.sampling.options import MAX_ALLOWED
from jaxllm.server.errors import ApiError, bad_request, sanitize
from jaxllm.server.openai.chat import MAX_MESSAGES
from jaxllm.server.openai.fields import read_json
from jaxllm.server.openai.limits import Rules, check_length
from jaxllm.server.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_PROMPTS,
    TOKENIZE_FIELDS,
)

LARGE = 1 << 20  # bytes of a legal field, blanks apart
MAX_REST = 1 << 20  # bytes between known fields, and in others
# Exceptions to LARGE; None is no limit
SIZE_LIMITS = {
    "prompt": None,
    "messages": None,
    "tokens": None,
    "allowed_token_ids": 12 * MAX_ALLOWED,
}
MAX_BYTES_PER_CHAR = 12  # of a character in JSON
MAX_CONTAINERS = 1 << 16  # lists and objects in a body
MAX_MEMBERS = 1 << 16  # members of objects in a body
MAX_ITEMS = 64 * MAX_MESSAGES  # items of lists and objects, token ids apart
MAX_TRUNCATED_IDS = 1 << 20  # ids of a prompt that is to be truncated
MAX_NAMED = 1 << 23  # bytes of a body that is scanned for the field at fault
TURN = 1 << 18  # bytes scanned or decoded before other tasks run
BLANKS = b" \t\r\n"

_KNOWN = COMPLETION_FIELDS | CHAT_FIELDS | TOKENIZE_FIELDS | SIZE_LIMITS.keys()
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_known_fields: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(_KNOWN)])
)
_LISTS = re.compile(rb"\[\s*\[")
_BETWEEN = re.compile(rb"[,\s]*")


@dataclass(slots=True)
class Shape:
    """Counts of a JSON text outside its strings; `size` is its bytes without blanks."""

    containers: int = 0
    members: int = 0
    commas: int = 0
    size: int = 0


async def shape_of(text: bytes) -> Shape:
    """The shape of a JSON text, counted in slices between which other tasks run; stops beyond the
    limits of legal bodies."""
    shape, at, within = Shape(), 0, 0
    while at < len(text) and shape.containers <= MAX_CONTAINERS and shape.members <= MAX_MEMBERS:
        piece = text[at : at + TURN]
        # An escaped character stays with its backslash
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = text[at : at + TURN + 1]
        at += len(piece)
        unescaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        parts = unescaped.split(b'"')
        outside = b"".join(parts[within::2])
        within ^= (len(parts) - 1) & 1
        shape.containers += outside.count(b"[") + outside.count(b"{")
        shape.members += outside.count(b":")
        shape.commas += outside.count(b",")
        shape.size += len(piece) - len(outside) + len(outside.translate(None, BLANKS))
        await asyncio.sleep(0)
    return shape


async def read_large(body: bytes, rules: Rules) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    shape = await shape_of(body)
    if shape.containers > MAX_CONTAINERS or shape.members > MAX_MEMBERS:
        raise too_many(body)
    raws = _decoded(_fields, body)
    await asyncio.sleep(0)
    rest = len(body) - sum(memoryview(raws[name]).nbytes for name in _KNOWN & raws.keys())
    if rest > MAX_REST:
        raise bad_request(
            f"the body holds {rest} bytes outside the fields of this server; "
            f"at most {MAX_REST} are taken"
        )
    truncates, found, read = "truncate_prompt_tokens" in raws, {}, 0
    for name, field in raws.items():
        found[name] = await _read(name, raw := bytes(field), truncates, rules)
        read += len(name) + len(raw)
        if read > TURN:
            read = 0
            await asyncio.sleep(0)
    return found


async def _read(name: str, raw: bytes, truncates: bool, rules: Rules) -> Any:
    """The value of one field."""
    if len(raw) > LARGE:
        await check_field(name, raw, truncates, rules)
        if name == "prompt" and _LISTS.match(raw):
            return await _lists(raw, truncates, rules)
        if _plain(raw, 0, end := raw.rfind(b"]")):
            return await _items(raw, 0, end)
    return read_json(raw)


def too_many(body: bytes) -> ApiError:
    """The refusal of a body with too many parts. It names the field that holds most of them, if
    the body is small enough to find it."""
    name = None
    if len(body) <= MAX_NAMED:
        found = _decoded(_known_fields, body)
        sizes = {name: memoryview(getattr(found, name)).nbytes for name in _KNOWN}
        largest = max(sizes, key=lambda name: sizes[name])
        name = largest if 2 * sizes[largest] > len(body) else None
    limits = (
        f"at most {MAX_CONTAINERS} lists and objects, and {MAX_MEMBERS} members of objects, "
        "are taken"
    )
    return bad_request(
        f"{name or 'the body'} has too many parts: {limits}; send fewer in one request", name
    )


async def check_field(name: str, raw: bytes, truncates: bool, rules: Rules) -> None:
    """Raise ApiError when a field's value cannot be legal."""
    shape = await shape_of(raw)
    most = SIZE_LIMITS.get(name, LARGE)
    if most is not None and shape.size > most:
        raise bad_request(
            f"{name} has {shape.size} bytes; no legal value has more than {most}", name
        )
    if name == "messages" and shape.commas > MAX_ITEMS:
        raise bad_request(
            f"messages has more than {MAX_ITEMS} parts; send fewer messages, of fewer parts", name
        )
    if name == "prompt" and _LISTS.match(raw) and shape.containers - 1 > MAX_PROMPTS:
        raise bad_request(
            f"at most {MAX_PROMPTS} prompts per request, got {shape.containers - 1}", name
        )
    if name == "tokens" or (
        name == "prompt" and not raw.startswith(b'"') and not _LISTS.match(raw)
    ):
        _check_items(name, shape.commas + 1, b'"' in raw, truncates and name == "prompt", rules)
    if (
        name == "prompt"
        and raw.startswith(b'"')
        and len(raw) - 2 > MAX_BYTES_PER_CHAR * rules.char_limit(truncates)
    ):
        limit = f"this model's maximum context length is {rules.resolved.max_model_len} tokens"
        message = f"{limit}, which a prompt of {len(raw)} bytes cannot fit into; shorten it"
        raise bad_request(message, "prompt", "context_length_exceeded")


def _check_items(name: str, items: int, texts: bool, truncates: bool, rules: Rules) -> None:
    if texts:
        if items > MAX_PROMPTS:
            raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {items}", name)
    elif not truncates:
        check_length(items, rules.resolved, name)
    elif items > MAX_TRUNCATED_IDS:
        raise bad_request(
            f"{name} has {items} token ids; at most {MAX_TRUNCATED_IDS} are read to be truncated",
            name,
        )


async def _lists(raw: bytes, truncates: bool, rules: Rules) -> list[Any]:
    """A list of lists of token ids, decoded in slices. `raw` is known to be JSON."""
    found, at, end, read = [], 1, raw.rindex(b"]"), 0
    while (stop := raw.find(b"]", at, end)) >= 0:
        start = _BETWEEN.match(raw, at).end()  # type: ignore[union-attr]
        if not _plain(raw, start, stop):
            break
        _check_items("prompt", raw.count(b",", start, stop) + 1, False, truncates, rules)
        found.append(
            await _items(raw, start, stop)
            if stop - start > TURN
            else read_json(raw[start : stop + 1])
        )
        read += stop - at
        at = stop + 1
        if read > TURN:
            read = 0
            await asyncio.sleep(0)
    if raw[at:end].strip(BLANKS):
        raise bad_request("prompt must not mix lists of token ids with anything else", "prompt")
    return found


def _plain(raw: bytes, start: int, stop: int) -> bool:
    """Whether `raw[start : stop + 1]` is a list without strings, lists and objects."""
    return (
        raw.startswith(b"[", start)
        and raw.count(b"[", start, stop) == 1
        and raw.find(b"{", start, stop) < 0
        and raw.find(b'"', start, stop) < 0
    )


async def _items(raw: bytes, start: int, end: int) -> list[Any]:
    """The plain list that ends at `end`, decoded in slices."""
    found, at = [], start + 1
    while at < end:
        comma = raw.find(b",", at + TURN, end)
        stop = end if comma < 0 else comma
        found += read_json(b"[%b]" % raw[at:stop])
        at = stop + 1
        await asyncio.sleep(0)
    return found


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not a JSON object that can be read: {sanitize(str(error))}",
            code="invalid_json",
        ) from None
