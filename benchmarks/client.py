"""A streaming client of the OpenAI protocol that costs little: one connection a request,
server-sent events stamped as they arrive."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.record import parser

LIMIT = 1 << 24  # bytes of one line that are still read


@dataclass
class Call:
    """The timings of one request. Times are in seconds; `begin` and `stamps` are readings of
    time.perf_counter."""

    begin: float = 0.0
    # Of every event that brings a choice, which is one or more tokens
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_text: str = ""  # of the first event
    error: str = ""

    @property
    def ttft(self) -> float:
        """To the first token."""
        return self.stamps[0] - self.begin

    @property
    def latency(self) -> float:
        """To the last token."""
        return self.stamps[-1] - self.begin

    @property
    def tpot(self) -> float:
        """Per token after the first; only of two tokens and more."""
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between events."""
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]


OTHER_IDS = "--token-ids LOW HIGH draws prompts of other token ids"


class Refused(Exception):
    """The server answered with an error; the message is its own."""


# Whatever a server may do to a request
FAULTS = (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError, Refused)


async def call(
    url: str,
    body: dict[str, Any],
    headers: dict[str, str],
    on_event: Callable[[Call], None] = lambda call: None,
) -> Call:
    """Send one streaming request and read it to its end. Faults of the server are reported in
    `error`, not raised."""
    out = Call(begin=time.perf_counter())
    try:
        async with contextlib.aclosing(
            events(url, body | {"stream": True, "stream_options": {"include_usage": True}}, headers)
        ) as stream:
            async for data in stream:
                if data.get("error"):
                    raise Refused(str(data["error"].get("message", data["error"])))
                if data.get("choices"):
                    out.stamps.append(time.perf_counter())
                    if len(out.stamps) == 1:
                        out.first_text = data["choices"][0].get("text", "")
                    on_event(out)
                if usage := data.get("usage"):
                    out.prompt_tokens, out.output_tokens = (
                        usage["prompt_tokens"],
                        usage["completion_tokens"],
                    )
                    out.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                        "cached_tokens", 0
                    )
        if not out.stamps:
            raise Refused("the stream ended without a token")
    except FAULTS as error:
        out.error = said(error)
    return out


def asked(model: str, ids: list[int], output: int) -> dict[str, Any]:
    """The body of a request for so many tokens, the likeliest ones."""
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
    }


def said(error: BaseException) -> str:
    """A fault in a line."""
    return f"{type(error).__name__}: {error}"[:300]


async def post(url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """The JSON that answers a request. Raises one of FAULTS."""
    async with contextlib.aclosing(reply(url, body, headers)) as chunks:
        return json.loads(b"".join([chunk async for chunk in chunks]))


async def events(
    url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON of every event until [DONE]. Raises Refused on any status but 200."""
    rest = b""
    async with contextlib.aclosing(reply(url, body, headers)) as chunks:
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                field, _, data = line.partition(b":")
                if data.strip() == b"[DONE]":
                    return
                if field == b"data":
                    yield json.loads(data)


async def reply(
    url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """The body of the answer, as it arrives. Raises Refused on any status but 200."""
    at = urlsplit(url)
    secure = at.scheme == "https"
    reader, writer = await asyncio.open_connection(
        at.hostname, at.port or (443 if secure else 80), ssl=secure or None, limit=LIMIT
    )
    try:
        writer.write(head(at.path, at.netloc, json.dumps(body).encode(), headers))
        status, fields = await answer(reader)
        chunks = content(reader, fields)
        if status != 200:
            words = b"".join([chunk async for chunk in chunks])
            remedy = f" ({OTHER_IDS})" if b'"invalid_token_id"' in words else ""
            raise Refused(f"{status} {words[:300].decode(errors='replace')}{remedy}")
        async for chunk in chunks:
            yield chunk
    finally:
        writer.close()


def head(path: str, host: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A POST as bytes."""
    fields = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    } | headers
    return (
        "".join(
            [
                f"POST {path} HTTP/1.1\r\n",
                *(f"{name}: {value}\r\n" for name, value in fields.items()),
                "\r\n",
            ]
        ).encode()
        + body
    )


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, with names in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def content(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives, out of its chunks where it has them. Raises EOFError when it breaks
    off.
    """
    if fields.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in fields:
        yield await reader.readexactly(int(fields["content-length"]))
    else:
        while data := await reader.read(1 << 16):
            yield data


def whole(least: int) -> Callable[[str], int]:
    """What reads a whole number from `least` up, as an argparse type."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    read.__name__ = "whole number"  # argparse names it where int() fails
    return read


def above_zero(text: str) -> float:
    """A number above 0, inf too, as an argparse type."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def share(text: str) -> float:
    """A number from 0 to 1, as an argparse type."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def client_parser(what: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark that talks to a server."""
    args = parser(what or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.set_defaults(model=None)
    args.add_argument("--base-url", default="http://127.0.0.1:8000")
    args.add_argument(
        "--serve",
        metavar="ARGS",
        help='start a server with these arguments for the time of the run, e.g. "shape:qwen2.5-7b"',
    )
    args.add_argument("--api-key", help="is not recorded")
    args.add_argument(
        "--token-ids",
        type=int,
        nargs=2,
        default=(1000, 100_000),
        metavar=("LOW", "HIGH"),
        help="ids of random prompts",
    )
    args.add_argument(
        "--device", help="of the server, for the record, when it is on another machine"
    )
    return args


def key_header(key: str | None) -> dict[str, str]:
    """The header that carries an API key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def first_model(base_url: str, headers: dict[str, str]) -> str:
    """The name under which a server serves its model."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/v1/models", headers=headers), timeout=60
    ) as reply:
        return str(json.load(reply)["data"][0]["id"])
