"""Reading request bodies under a size limit and a deadline, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import msgspec

from jaxllm.sampling.options import MAX_ALLOWED
from jaxllm.server.errors import ApiError, bad_request, sanitize
from jaxllm.server.fields import loads
from jaxllm.server.gate import header
from jaxllm.server.protocol import CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS, Rules, check_length

BODY_DEADLINE = 60.0  # seconds for a whole body to arrive
LARGE = 1 << 20  # bytes; a legal value of a field has no more
ROOMY = {"prompt": None, "messages": None, "tokens": None, "allowed_token_ids": 12 * MAX_ALLOWED}  # but of these
MOST_BYTES = 12  # that a character takes in JSON
IDS = re.compile(rb"\[\s*[0-9]")

_KNOWN = sorted(COMPLETION_FIELDS | CHAT_FIELDS | TOKENIZE_FIELDS | ROOMY.keys())
_skimmer: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in _KNOWN])
)


async def read_json(scope: dict[str, Any], receive: Any, limit: int, rules: Rules) -> dict[str, Any]:
    """The JSON object that a request carries. Raises ApiError: 400 malformed, 408 too slow, 413 too large, 415 wrong type."""
    body = await read_body(scope, receive, limit)
    if len(body) > LARGE:
        await asyncio.sleep(0)  # others have their turn
        skim(body, rules)
        await asyncio.sleep(0)
    found = loads(body)
    check_type(scope["headers"])
    return found


def skim(body: bytes, rules: Rules) -> None:
    """Refuse a large body that cannot be legal before objects are made of it, which takes ten times as long and holds up everybody else.
    Raises ApiError(400)."""
    try:
        found = _skimmer.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_request(f"the body is not a JSON object that can be read: {sanitize(str(error))}", code="invalid_json") from None
    sizes = {name: memoryview(getattr(found, name)).nbytes for name in _KNOWN}
    for name, size in sizes.items():
        most = ROOMY.get(name, LARGE)
        if most is not None and size > most:
            raise bad_request(f"{name} has {size} bytes; no legal value has more than {most}", name)
    if (rest := len(body) - sum(sizes.values())) > LARGE:
        raise bad_request(f"the body holds {rest} bytes that are in none of the fields of this server; at most {LARGE} are taken")
    prompt = bytes(found.prompt)
    most = rules.most_chars(bool(sizes["truncate_prompt_tokens"]))
    if prompt.startswith(b'"') and sizes["prompt"] - 2 > MOST_BYTES * most:
        limit = f"this model's maximum context length is {rules.resolved.max_model_len} tokens"
        message = f"{limit}, which a prompt of {sizes['prompt']} bytes cannot fit into; shorten it"
        raise bad_request(message, "prompt", "context_length_exceeded")
    if IDS.match(prompt) and not sizes["truncate_prompt_tokens"]:
        check_length(prompt.count(b",") + 1, rules.resolved, "prompt")


def check_type(headers: list[tuple[bytes, bytes]]) -> None:
    """A body need not be declared as JSON, except by browsers: pages of other origins can send undeclared bodies unasked."""
    declared = (header(headers, b"content-type") or b"").split(b";")[0].strip().lower()
    if declared == b"application/json" or declared.endswith(b"+json"):
        return
    if header(headers, b"origin") is not None:
        raise ApiError(415, "send the body with the header Content-Type: application/json", code="unsupported_media_type")


async def read_body(scope: dict[str, Any], receive: Any, limit: int) -> bytes:
    """The whole body, held to `limit` bytes while it arrives."""
    declared = header(scope["headers"], b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_DEADLINE:g} seconds", code="request_timeout") from None


def too_large(limit: int) -> ApiError:
    """The 413."""
    return ApiError(413, f"the body is larger than {limit} bytes (--max-body-size)", code="request_too_large")


async def until_gone(receive: Any) -> None:
    """Returns when the client has closed the connection. Only for use after the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone[T](gone: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. When the client goes first, it is cancelled: what of it waits for a thread is never begun. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        task.cancel()
        await asyncio.wait((task,))


class ClientGone(ApiError):
    """The client closed the connection; nobody will read a reply."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection", code="client_gone")
