"""Reading request bodies under limits of size and time, and noticing that a client has gone.

Large bodies must not hold up the event loop. Those that cannot be legal are refused before they are
decoded, which takes ten times as long as scanning them. Legal ones are decoded field by field, and
other tasks run in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxllm.sampling.options import MAX_ALLOWED
from jaxllm.server.errors import (
    ApiError,
    ContextOverflow,
    bad_request,
    overloaded,
    sanitize,
    shutting_down,
)
from jaxllm.server.openai.chat import MAX_MESSAGES
from jaxllm.server.openai.digits import keep_digits, may_hold_long
from jaxllm.server.openai.fields import read_json, read_object
from jaxllm.server.openai.limits import Rules, check_chars, check_length
from jaxllm.server.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_PROMPTS,
    TOKENIZE_FIELDS,
)
from jaxllm.server.transport.auth import header

BODY_DEADLINE = 60.0  # seconds for a whole body to arrive
COMPRESSED = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress"})
PARSED = "jaxllm.body"  # key of an ASGI scope: the body as it was read already
TOTAL = 1 << 30  # bytes of all bodies being read

LARGE = 1 << 20  # bytes of a legal field, without whitespace
MAX_REST = 1 << 20  # bytes between known fields, and in others
PROMPTS = ("prompt", "text", "input_ids")  # fields that hold prompts
# Exceptions to LARGE; None is no limit
SIZE_LIMITS = {
    **dict.fromkeys((*PROMPTS, "tokens", "system", "messages", "documents", "input", "inputs")),
    **dict.fromkeys(("query", "queries", "items", "texts", "text_1", "text_2", "data_1", "data_2")),
    **dict.fromkeys(("instructions", "suffix")),
    "allowed_token_ids": 12 * MAX_ALLOWED,
}
MAX_CONTAINERS = 1 << 16  # lists and objects in a body
MAX_MEMBERS = 1 << 16  # members of objects in a body
MAX_ITEMS = 64 * MAX_MESSAGES  # items of lists and objects, token ids apart
MAX_TRUNCATED_IDS = 1 << 20  # ids of a prompt that is to be truncated
MAX_NAMED = 1 << 23  # bytes of a body that is scanned for the field at fault
TURN = 1 << 18  # bytes scanned or decoded before other tasks run
WHITESPACE = b" \t\r\n"
CONTINUATIONS = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character

_KNOWN = COMPLETION_FIELDS | CHAT_FIELDS | TOKENIZE_FIELDS | SIZE_LIMITS.keys()
_any_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_known_fields: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(_KNOWN)])
)
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")
_BETWEEN = re.compile(rb"[,\s]*")


class Bodies:
    """Reads request bodies of up to `limit` bytes each, and `total` bytes at a time."""

    def __init__(self, limit: int, rules: Rules, total: int = TOTAL):
        self._limit, self._rules, self._total = limit, rules, max(total, limit)
        self._bytes_read = 0  # of bodies being read
        self._deadlines: set[asyncio.Timeout] = set()  # of bodies still arriving
        self._refusing = False

    def refuse_all(self) -> None:
        """Refuse bodies that are still arriving, and all later ones."""
        self._refusing = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    async def read_json(self, scope: dict[str, Any], receive: Any) -> dict[str, Any]:
        """The JSON object in a request's body, or the one that was read of it before.

        Raises ApiError: 400 malformed, 408 too slow, 413 too large, 415 wrong type, 503 when too
        much arrives at once or the server stops.
        """
        if PARSED in scope:
            return scope[PARSED]
        check_encoding(scope["headers"])
        chunks: list[bytes] = []
        try:
            await self._receive(scope, receive, chunks)
            body = b"".join(chunks)
            found = read_small(body) if len(body) <= TURN else await read_large(body, self._rules)
        finally:
            self._bytes_read -= sum(map(len, chunks))
        check_type(scope["headers"])
        return found

    async def _receive(self, scope: dict[str, Any], receive: Any, chunks: list[bytes]) -> None:
        """Receive the body into `chunks`, under the limits."""
        declared = header(scope["headers"], b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._limit:
            raise too_large(self._limit)
        size = 0
        try:
            async with asyncio.timeout(0 if self._refusing else BODY_DEADLINE) as deadline:
                self._deadlines.add(deadline)
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    self._bytes_read += len(chunks[-1])
                    if size > self._limit:
                        raise too_large(self._limit)
                    if self._bytes_read > self._total:
                        raise overloaded(
                            f"{self._total} bytes of other requests' bodies are being read; "
                            "retry later",
                            "bodies_full",
                        )
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            if self._refusing:
                raise shutting_down() from None
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_DEADLINE:g} seconds",
                code="request_timeout",
                headers={"connection": "close"},  # the rest of the body may never come
            ) from None
        finally:
            self._deadlines.discard(deadline)


def check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse compressed bodies: a small one could expand to a large one."""
    encoding = (header(headers, b"content-encoding") or b"").strip().lower()
    if not COMPRESSED.isdisjoint(name.strip() for name in encoding.split(b",")):
        raise ApiError(
            415,
            f"the body is compressed ({encoding.decode()}); send it as it is",
            code="unsupported_media_type",
        )


def check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a browser's body that is not declared as JSON: pages of other origins can send such
    bodies. Other clients need not declare it."""
    declared = (header(headers, b"content-type") or b"").split(b";")[0].strip().lower()
    if declared == b"application/json" or declared.endswith(b"+json"):
        return
    if header(headers, b"origin") is not None:
        raise ApiError(
            415,
            "send the body with the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def too_large(limit: int) -> ApiError:
    """The 413."""
    return ApiError(
        413, f"the body is larger than {limit} bytes (--max-body-size)", code="request_too_large"
    )


async def until_gone(receive: Any) -> None:
    """Wait until the client closes the connection; to be used once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone[T](gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes first. Raises ClientGone."""
    task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    if task.done():
        return task.result()
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        task.cancel()
        await asyncio.wait((task,))


class ClientGone(ApiError):
    """The client closed the connection, so a reply would not be read."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_gone")


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
    shape, within = Shape(), 0
    for piece in _slices(text):
        unescaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        parts = unescaped.split(b'"')
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


def read_small(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    fields = read_object(body)
    if isinstance(fields.get("messages"), list) and may_hold_long(body):
        keep_digits(fields["messages"], bytes(_decode(_any_fields, body)["messages"]))
    return fields


async def read_large(body: bytes, rules: Rules) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    shape = await shape_of(body)
    if shape.containers > MAX_CONTAINERS or shape.members > MAX_MEMBERS:
        raise too_many_parts(body)
    raws = _decode(_any_fields, body)
    await asyncio.sleep(0)
    rest = len(body) - sum(memoryview(raws[name]).nbytes for name in _KNOWN & raws.keys())
    if rest > MAX_REST:
        raise bad_request(
            f"the body holds {rest} bytes outside the fields of this server; "
            f"at most {MAX_REST} are taken"
        )
    truncates, found, read = "truncate_prompt_tokens" in raws, {}, 0
    for name, field in raws.items():
        found[name] = await _decode_field(name, raw := bytes(field), truncates, rules)
        read += len(name) + len(raw)
        if read > TURN:
            read = 0
            await asyncio.sleep(0)
    return found


async def _decode_field(name: str, raw: bytes, truncates: bool, rules: Rules) -> Any:
    """The value of one field; a large one is checked first, and lists are decoded in slices."""
    if len(raw) > LARGE:
        await check_field(name, raw, truncates, rules)
        if name in PROMPTS and _LIST_OF_LISTS.match(raw):
            return await _decode_id_lists(name, raw, truncates, rules)
        if _is_flat_list(raw, 0, end := raw.rfind(b"]")):
            return await _decode_ids(raw, 0, end)
    value = read_json(raw)
    if name == "messages" and may_hold_long(raw):
        keep_digits(value, raw)
    return value


def too_many_parts(body: bytes) -> ApiError:
    """The refusal of a body with too many parts. It names the field that holds most of them, if
    the body is small enough to find it."""
    name = None
    if len(body) <= MAX_NAMED:
        found = _decode(_known_fields, body)
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
    if name in ("messages", "input") and shape.commas > MAX_ITEMS:
        raise bad_request(
            f"{name} has more than {MAX_ITEMS} parts; send fewer items, of fewer parts", name
        )
    if name in PROMPTS and _LIST_OF_LISTS.match(raw) and shape.containers - 1 > MAX_PROMPTS:
        raise bad_request(
            f"at most {MAX_PROMPTS} prompts per request, got {shape.containers - 1}", name
        )
    if name == "tokens" or (
        name in PROMPTS and not raw.startswith(b'"') and not _LIST_OF_LISTS.match(raw)
    ):
        _check_prompt_items(
            name, shape.commas + 1, b'"' in raw, truncates and name in PROMPTS, rules
        )
    if name in PROMPTS and raw.startswith(b'"'):
        check_chars(await least_chars(raw), rules, name, truncates, exact=b"\\" not in raw)


def _check_prompt_items(name: str, items: int, texts: bool, truncates: bool, rules: Rules) -> None:
    """Refuse a list of too many texts, or of more token ids than fit the context."""
    if texts:
        if items > MAX_PROMPTS:
            raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {items}", name)
    elif not truncates:
        check_length(items, rules.resolved, name, generates=name in PROMPTS)
    elif items > MAX_TRUNCATED_IDS:
        remedy = f"at most {MAX_TRUNCATED_IDS} are read to be truncated; shorten it"
        raise ContextOverflow(rules.resolved.max_model_len, items, name, remedy=remedy)


async def _decode_id_lists(name: str, raw: bytes, truncates: bool, rules: Rules) -> list[Any]:
    """A list of lists of token ids, decoded in slices. `raw` is known to be JSON."""
    found, at, end, read = [], 1, raw.rindex(b"]"), 0
    while (stop := raw.find(b"]", at, end)) >= 0:
        start = _BETWEEN.match(raw, at).end()  # type: ignore[union-attr]
        if not _is_flat_list(raw, start, stop):
            break
        _check_prompt_items(name, raw.count(b",", start, stop) + 1, False, truncates, rules)
        found.append(
            await _decode_ids(raw, start, stop)
            if stop - start > TURN
            else read_json(raw[start : stop + 1])
        )
        read += stop - at
        at = stop + 1
        if read > TURN:
            read = 0
            await asyncio.sleep(0)
    if raw[at:end].strip(WHITESPACE):
        raise bad_request(f"{name} must not mix lists of token ids with anything else", name)
    return found


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
    found, at = [], start + 1
    while at < end:
        comma = raw.find(b",", at + TURN, end)
        stop = end if comma < 0 else comma
        found += read_json(b"[%b]" % raw[at:stop])
        at = stop + 1
        await asyncio.sleep(0)
    return found


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Raises ApiError(400) when the body is no JSON object."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is not a JSON object that can be read: {sanitize(str(error))}",
            code="invalid_json",
        ) from None
