"""Large bodies, which must not hold up the event loop.

Those that cannot be legal are refused before they are decoded, which takes ten times as long as
scanning them. Legal ones are decoded field by field, and other tasks run in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.server.errors import ApiError, ContextOverflow, bad_request, sanitize
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.digits import keep_digits, may_hold_long
from jaxllm.server.requests.fields import read_json
from jaxllm.server.requests.limits import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    Rules,
    check_chars,
    check_length,
)

LARGE = 1 << 20  # bytes of a legal field, without whitespace
MAX_REST = 1 << 20  # bytes between known fields, and in others
MAX_CONTAINERS = 1 << 16  # lists and objects in a body
MAX_MEMBERS = 1 << 16  # members of objects in a body
MAX_ITEMS = 64 * MAX_MESSAGES  # items of lists and objects, token ids apart
MAX_TRUNCATED_IDS = 1 << 20  # ids of a prompt that is to be truncated
MAX_NAMED = 1 << 23  # bytes of a body that is scanned for the field at fault
TURN = 1 << 18  # bytes scanned or decoded before other tasks run
WHITESPACE = b" \t\r\n"
CONTINUATIONS = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character

_any_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")
_BETWEEN = re.compile(rb"[,\s]*")


class LargeBodies:
    """Reads large bodies of routes that know `fields`, and checks prompts in them by `rules`."""

    def __init__(self, fields: BodyFields, rules: Rules):
        self._fields = fields
        self._rules = rules
        # Skips all other fields, of which a hostile body may have millions
        members = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(fields.known)]
        self._known_fields: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("Fields", members)
        )

    async def read(self, body: bytes) -> dict[str, Any]:
        """The JSON object in `body`. Raises ApiError(400)."""
        shape = await shape_of(body)
        if shape.containers > MAX_CONTAINERS or shape.members > MAX_MEMBERS:
            raise self._too_many_parts(body)
        raws = raw_fields(body)
        await asyncio.sleep(0)
        known = self._fields.known & raws.keys()
        rest = len(body) - sum(memoryview(raws[name]).nbytes for name in known)
        if rest > MAX_REST:
            raise bad_request(
                f"the body holds {rest} bytes outside the fields of this server; "
                f"at most {MAX_REST} are taken"
            )
        truncates = "truncate_prompt_tokens" in raws
        values: dict[str, Any] = {}
        bytes_read = 0  # since other tasks ran
        for name, value in raws.items():
            raw = bytes(value)
            values[name] = await self._decode_field(name, raw, truncates)
            bytes_read += len(name) + len(raw)
            if bytes_read > TURN:
                bytes_read = 0
                await asyncio.sleep(0)
        return values

    async def _decode_field(self, name: str, raw: bytes, truncates: bool) -> Any:
        """The value of one field; a large one is checked first, and lists are decoded in slices."""
        if len(raw) > LARGE:
            await self._check_field(name, raw, truncates)
            if name in self._fields.prompts and _LIST_OF_LISTS.match(raw):
                return await self._decode_id_lists(name, raw, truncates)
            end = raw.rfind(b"]")
            if _is_flat_list(raw, 0, end):
                return await _decode_ids(raw, 0, end)
        value = read_json(raw)
        if name == "messages" and may_hold_long(raw):
            keep_digits(value, raw)
        return value

    def _too_many_parts(self, body: bytes) -> ApiError:
        """The refusal of a body with too many parts. It names the field that holds most of them, if
        the body is small enough to find it."""
        name = None
        if len(body) <= MAX_NAMED:
            raws = _decode(self._known_fields, body)
            sizes = {name: memoryview(getattr(raws, name)).nbytes for name in self._fields.known}
            largest = max(sizes, key=lambda name: sizes[name])
            if 2 * sizes[largest] > len(body):
                name = largest
        limits = (
            f"at most {MAX_CONTAINERS} lists and objects, and {MAX_MEMBERS} members of objects, "
            "are taken"
        )
        return bad_request(
            f"{name or 'the body'} has too many parts: {limits}; send fewer in one request", name
        )

    async def _check_field(self, name: str, raw: bytes, truncates: bool) -> None:
        """Raise ApiError when a field's value cannot be legal."""
        shape = await shape_of(raw)
        most = self._fields.sizes.get(name, LARGE)
        if most is not None and shape.size > most:
            raise bad_request(
                f"{name} has {shape.size} bytes; no legal value has more than {most}", name
            )
        if name in self._fields.messages and shape.commas > MAX_ITEMS:
            raise bad_request(
                f"{name} has more than {MAX_ITEMS} parts; send fewer items, of fewer parts", name
            )
        if name in self._fields.token_ids:
            self._check_prompt_items(name, shape.commas + 1, b'"' in raw, False)
        if name not in self._fields.prompts:
            return
        if _LIST_OF_LISTS.match(raw):
            if shape.containers - 1 > MAX_PROMPTS:
                raise bad_request(
                    f"at most {MAX_PROMPTS} prompts per request, got {shape.containers - 1}", name
                )
        elif raw.startswith(b'"'):
            chars = await least_chars(raw)
            check_chars(chars, self._rules, name, truncates, exact=b"\\" not in raw)
        else:
            self._check_prompt_items(name, shape.commas + 1, b'"' in raw, truncates)

    def _check_prompt_items(self, name: str, items: int, texts: bool, truncates: bool) -> None:
        """Refuse a list of too many texts, or of more token ids than fit the context."""
        resolved = self._rules.resolved
        if texts:
            if items > MAX_PROMPTS:
                raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {items}", name)
        elif not truncates:
            check_length(items, resolved, name, generates=name in self._fields.prompts)
        elif items > MAX_TRUNCATED_IDS:
            remedy = f"at most {MAX_TRUNCATED_IDS} are read to be truncated; shorten it"
            raise ContextOverflow(resolved.max_model_len, items, name, remedy=remedy)

    async def _decode_id_lists(self, name: str, raw: bytes, truncates: bool) -> list[Any]:
        """A list of lists of token ids, decoded in slices. `raw` is known to be JSON."""
        lists: list[Any] = []
        end = raw.rindex(b"]")
        position = 1
        bytes_read = 0  # since other tasks ran
        while (stop := raw.find(b"]", position, end)) >= 0:
            start = _BETWEEN.match(raw, position).end()  # type: ignore[union-attr]
            if not _is_flat_list(raw, start, stop):
                break
            self._check_prompt_items(name, raw.count(b",", start, stop) + 1, False, truncates)
            if stop - start > TURN:
                lists.append(await _decode_ids(raw, start, stop))
            else:
                lists.append(read_json(raw[start : stop + 1]))
            bytes_read += stop - position
            position = stop + 1
            if bytes_read > TURN:
                bytes_read = 0
                await asyncio.sleep(0)
        if raw[position:end].strip(WHITESPACE):
            raise bad_request(f"{name} must not mix lists of token ids with anything else", name)
        return lists


@dataclass(slots=True)
class Shape:
    """Counts of a JSON text outside its strings; `size` is its bytes without whitespace."""

    containers: int = 0
    members: int = 0
    commas: int = 0
    size: int = 0


async def shape_of(text: bytes) -> Shape:
    """The shape of a JSON text, counted in slices between which other tasks run; stops beyond the
    limits of legal bodies."""
    shape = Shape()
    within = 0  # 1 where a slice begins within a string
    for piece in _slices(text):
        if b"\\" in piece:
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        else:
            parts = piece.split(b'"')
        outside = b"".join(parts[within::2])
        within ^= (len(parts) - 1) & 1
        shape.containers += outside.count(b"[") + outside.count(b"{")
        shape.members += outside.count(b":")
        shape.commas += outside.count(b",")
        shape.size += len(piece) - len(outside) + len(outside.translate(None, WHITESPACE))
        if shape.containers > MAX_CONTAINERS or shape.members > MAX_MEMBERS:
            break
        await asyncio.sleep(0)
    return shape


async def least_chars(raw: bytes) -> int:
    """Characters that a string of JSON has at least: all of them, unless it has escapes that are
    longer than two bytes, or escaped backslashes. Counted in slices between which other tasks
    run."""
    least = -2  # the quotes
    for piece in _slices(raw):
        codes = piece.count(b"\\u")
        short = piece.count(b"\\") - codes
        # A code has six bytes, and a character beyond 16 bits two codes
        least += len(piece.translate(None, CONTINUATIONS)) - short - (11 * codes + 1) // 2
        await asyncio.sleep(0)
    return least


def _slices(text: bytes) -> Iterator[bytes]:
    """A JSON text in slices; an escaped character stays with its backslash."""
    start = 0
    while start < len(text):
        piece = text[start : start + TURN]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = text[start : start + TURN + 1]
        start += len(piece)
        yield piece


def _is_flat_list(raw: bytes, start: int, stop: int) -> bool:
    """Whether `raw[start : stop + 1]` is a list without strings, lists and objects."""
    return (
        raw.startswith(b"[", start)
        and raw.count(b"[", start, stop) == 1
        and raw.find(b"{", start, stop) < 0
        and raw.find(b'"', start, stop) < 0
    )


async def _decode_ids(raw: bytes, start: int, end: int) -> list[Any]:
    """The flat list in `raw[start : end + 1]`, decoded in slices."""
    ids: list[Any] = []
    position = start + 1
    while position < end:
        stop = raw.find(b",", position + TURN, end)
        if stop < 0:
            stop = end
        ids += read_json(b"[%b]" % raw[position:stop])
        position = stop + 1
        await asyncio.sleep(0)
    return ids


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, whose values are not decoded. Raises ApiError(400)."""
    return _decode(_any_fields, body)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Raises ApiError(400) when the body is no JSON object."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not a JSON object that can be read: {sanitize(str(error))}",
            code="invalid_json",
        ) from None
