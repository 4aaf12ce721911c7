"""A streaming client of the OpenAI protocol that costs little: one connection a request,
server-sent events stamped as they arrive."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.record import parser
from benchmarks.shapes import PREFIX, write, write_tokenizer

LIMIT = 1 << 24  # bytes of one line that are still read


@dataclass
class Call:
    """The timings of one request. Times are in seconds; `begin` and `stamps` are readings of
    time.perf_counter."""

    begin: float = 0.0
    # Of every event that brings a choice, which is one or more tokens
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
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


class Refused(Exception):
    """The server answered with an error; the message is its own."""


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
                    on_event(out)
                if usage := data.get("usage"):
                    out.prompt_tokens, out.output_tokens = (
                        usage["prompt_tokens"],
                        usage["completion_tokens"],
                    )
        if not out.stamps:
            raise Refused("the stream ended without a token")
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        asyncio.LimitOverrunError,
        Refused,
    ) as error:
        out.error = f"{type(error).__name__}: {error}"[:300]
    return out


async def events(
    url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every event until [DONE]. Raises Refused on any status but 200."""
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
            reply = b"".join([chunk async for chunk in chunks])[:300]
            raise Refused(f"{status} {reply.decode(errors='replace')}")
        rest = b""
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                field, _, data = line.partition(b":")
                if data.strip() == b"[DONE]":
                    return
                if field == b"data":
                    yield json.loads(data)
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


@contextlib.contextmanager
def served(arguments: str | None, base_url: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The URL of a server, and how long it took to be ready: one that is there, or with `arguments`
    one of our own that ends afterwards. `shape:NAME` as the first argument stands for random
    weights of a shape. Raises SystemExit when the server ends before it is ready."""
    if arguments is None:
        yield base_url, {}
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        words = shlex.split(arguments)
        if words[0].startswith(PREFIX):
            directory = write(words[0].removeprefix(PREFIX), Path(folder))
            write_tokenizer(directory)
            words[:1] = [str(directory), "--load-format", "dummy"]
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        begin = time.perf_counter()
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxllm.server",
                *words,
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
        ) as process:
            try:
                while not ready(f"http://127.0.0.1:{port}/ready"):
                    if process.poll() is not None:
                        raise SystemExit("the server ended before it was ready")
                    time.sleep(0.05)
                yield (
                    f"http://127.0.0.1:{port}",
                    {"server_ready_s": round(time.perf_counter() - begin, 2)},
                )
            finally:
                process.terminate()


def ready(url: str) -> bool:
    """Whether a server takes requests."""
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False


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
