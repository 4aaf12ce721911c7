"""What a streamed token costs the server: microseconds of its CPU, parsers off and on.

    python -m benchmarks.streaming --save
    python -m benchmarks.streaming --before DIR

Each server runs over an engine without a model that gives every stream a token a step
(`paced_engine.py`). Servers stream in turns of 50 ms, so that whatever else the machine does slows
all of them alike. CPU time is that of a server's process, from the first byte of its first stream
to the end of its last; shares are of what servers use in the same second. `--before` is a checkout
of other code, whose own `benchmarks.paced_engine` serves it with parsers off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import head
from benchmarks.record import finish, host, parser
from benchmarks.server import ready

HERE = Path(__file__).parents[1]
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps (for 8 hours).\n"
CODE = "def f(x):\n    if x < 3 and y > 4:\n        return {'a': [x, \"b\"]}\n\n"
WINDOW_SECONDS = 1.0
FIRST, LAST = b"HTTP/1.1 200 ", b"data: [DONE]\n\n"
OFF = ("--reasoning-parser", "none", "--tool-call-parser", "none")
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Way:
    """A server and what it is asked for.

    Attributes:
        tree: the checkout that it runs from.
        flags: of the server.
        calls: whether its engine says a thought, a reply and a call; else a reply.
        fields: of the body, beside the usual ones.
    """

    tree: Path
    flags: tuple[str, ...]
    calls: bool
    fields: dict[str, Any]


def ways(before: Path | None) -> dict[str, Way]:
    """What is compared with the first."""
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    found = {
        "off": Way(HERE, OFF, False, thinks),
        "on, a reply": Way(HERE, (), False, thinks | {"tools": [TOOL]}),
        "on, a thought, a reply and a call": Way(HERE, (), True, thinks | {"tools": [TOOL]}),
    }
    return found if before is None else found | {"before": Way(before, (), False, {})}


def tokens_of(text: str) -> list[str]:
    """A text cut as tokenizers might: words of a few letters, escapes whole."""
    return re.findall(r"\\.|[^\\]{1,4}", text, re.DOTALL)


def said(count: int, calls: bool) -> list[str]:
    """So many tokens: a reply, or a thought, a reply and a call of equal lengths."""
    words, code = tokens_of(WORDS * count), tokens_of(json.dumps(CODE * count)[1:-1])
    if not calls:
        return words[:count]
    third = words[: count // 3]
    before = ["<think>", "\n", *third, "\n", "</think>", "\n\n", *third]
    before += ["<tool_call>", *tokens_of('\n{"name": "run", "arguments": {"code": "')]
    after = ['"}}', "\n", "</tool_call>"]
    return [*before, *code[: count - len(before) - len(after)], *after]


@dataclass
class Server:
    """A running server and its costs.

    Attributes:
        cpu: seconds when the present round began; None before its first byte.
        streams: that have not ended.
        costs: µs a token of each round.
        windows: CPU seconds of each second in which all servers streamed.
    """

    port: int
    pid: int
    request: bytes
    cpu: float | None = None
    streams: int = 0
    costs: list[float] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        """What all threads of the process have used."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def serving(way: Way, turn: int, turns: int, a: argparse.Namespace) -> Iterator[Server]:
    """A server for as long as it is needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan = {"streams": a.streams, "rate": a.rate, "tokens": said(a.tokens, way.calls)}
    environment = {
        "PYTHONPATH": str(way.tree),
        "PACED": json.dumps(plan | {"turn": turn, "turns": turns}),
    }
    command = [sys.executable, "-m", "benchmarks.paced_engine", "serve", "--model", a.model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", *way.flags]
    body = {"model": a.model, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    raw = json.dumps(body | way.fields).encode()
    process = subprocess.Popen(command, cwd=way.tree, env=os.environ | environment)
    try:
        while not ready(f"http://127.0.0.1:{port}/ready"):
            if process.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.1)
        yield Server(port, process.pid, head("/v1/chat/completions", "localhost", raw, {}))
    finally:
        process.terminate()
        process.wait()


def one_round(servers: list[Server], a: argparse.Namespace) -> None:
    """All streams of all servers, from their beginning to their end."""
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for server in servers:
            server.cpu, server.streams = None, a.streams
            for _ in range(a.streams):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                one.sendall(server.request)
                waiting.register(one, selectors.EVENT_READ, (server, bytearray()))
        since, before = math.inf, [0.0] * len(servers)
        while waiting.get_map():
            if time.monotonic() - since >= WINDOW_SECONDS or since == math.inf:
                now = [server.cpu_seconds() for server in servers]
                if all(server.cpu is not None and server.streams for server in servers):
                    if since < math.inf:
                        for server, new, old in zip(servers, now, before, strict=True):
                            server.windows.append(new - old)
                    since, before = time.monotonic(), now
            for key, _ in waiting.select():
                server, seen = key.data
                if server.cpu is None:
                    server.cpu = server.cpu_seconds()
                if ended(key.fileobj.recv(1 << 16), seen):  # type: ignore[union-attr]
                    waiting.unregister(key.fileobj)
                    server.streams -= 1
                    if not server.streams:
                        used = server.cpu_seconds() - server.cpu
                        server.costs.append(1e6 * used / a.streams / a.tokens)


def ended(data: bytes, seen: bytearray) -> bool:
    """Whether a stream has ended with this. `seen` are its latest bytes. Raises SystemExit when its
    request was refused or it broke off."""
    if not seen and not data.startswith(FIRST):
        raise SystemExit(f"a request failed: {data[:500]!r}")
    seen[:] = (seen + data)[-64:]
    if not data and LAST not in seen:
        raise SystemExit(f"a stream broke off: {bytes(seen)!r}")
    return LAST in seen


def figures(servers: dict[str, Server]) -> dict[str, dict[str, float]]:
    """Of each way: its costs, and how much more of the CPU it takes than the first, in percent:
    the median over all seconds, and the quartiles."""
    first = next(iter(servers.values()))
    made = {}
    for name, server in servers.items():
        more = [
            100 * own / other - 100
            for own, other in zip(server.windows, first.windows, strict=True)
        ]
        low, middle, high = statistics.quantiles(more, n=4)
        made[name] = {
            "cpu_us_per_token": round(statistics.median(server.costs), 2),
            "lowest": round(min(server.costs), 2),
            "more_percent": round(middle, 1),
            "lower_quartile": round(low, 1),
            "upper_quartile": round(high, 1),
            "seconds": len(more),
        }
    return made


def main() -> None:
    """Parses the command line and prints the table."""
    own = parser(__doc__)
    own.formatter_class = argparse.RawDescriptionHelpFormatter
    own.add_argument("--streams", type=int, default=256)
    own.add_argument("--tokens", type=int, default=768, help="of each stream")
    own.add_argument("--rate", type=float, default=30_000.0, help="tokens a second of a server")
    own.add_argument("--rounds", type=int, default=8)
    own.add_argument("--before", type=Path, help="another checkout to compare with")
    a = own.parse_args()
    compared = ways(a.before)
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(way, turn, len(compared), a))
            for turn, (name, way) in enumerate(compared.items())
        }
        for _ in range(a.rounds):
            one_round([*servers.values()], a)
        made = figures(servers)
    a.before = a.before and "another checkout"
    finish("streaming", a, made, host())


if __name__ == "__main__":
    main()
