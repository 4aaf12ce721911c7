"""Asks a running server what its users ask, a line each.

    python -m server.smoke http://localhost:8000 --wait 600

Exits with 1 at the first answer that is wrong. A key comes from JAXLLM_API_KEY. A server that still
starts is given `--wait` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any


class Server:
    """A server's routes, with the key where there is one."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        key = os.environ.get("JAXLLM_API_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of a route; with a body it is posted as JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | ({} if body is None else {"Content-Type": "application/json"})
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait(self, seconds: float) -> None:
        """Return once the server is ready. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} was not ready in {seconds:.0f} s (--wait)")
            time.sleep(0.5)


def models(server: Server) -> str:
    status, text = server.get("/v1/models")
    names = [model["id"] for model in json.loads(text)["data"]]
    _expect(status == 200 and bool(names), text)
    return ", ".join(names)


def completion(server: Server) -> str:
    status, text = server.get(
        "/v1/completions", {"model": _name(server), "prompt": "One two three", "max_tokens": 4}
    )
    _expect(status == 200, text)
    return repr(json.loads(text)["choices"][0]["text"])


def stream(server: Server) -> str:
    body = {"model": _name(server), "prompt": "One two three", "max_tokens": 4, "stream": True}
    status, text = server.get("/v1/completions", body)
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    _expect(status == 200 and events[-1] == "data: [DONE]", text)
    return f"{len(events)} events"


def refusal(server: Server) -> str:
    status, text = server.get(
        "/v1/completions", {"model": _name(server), "prompt": "x", "max_tokens": -1}
    )
    _expect(status == 400 and "max_tokens" in text, text)
    return "400"


def metrics(server: Server) -> str:
    status, text = server.get("/metrics")
    line = next(
        (line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")), ""
    )
    _expect(status == 200 and float(line.rsplit(" ", 1)[1]) > 0, line or text[:300])
    return line.rsplit(" ", 1)[1] + " tokens generated"


def _expect(right: bool, text: str) -> None:
    if not right:
        raise ValueError(f"unexpected answer: {text}")


def _name(server: Server) -> str:
    return models(server).split(", ")[0]


CHECKS: dict[str, Callable[[Server], str]] = {
    "/v1/models": models,
    "a completion": completion,
    "a stream": stream,
    "a bad request": refusal,
    "/metrics": metrics,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("url", nargs="?", default="http://localhost:8000")
    arguments.add_argument("--wait", type=float, default=0, metavar="SECONDS")
    a = arguments.parse_args()
    server = Server(a.url)
    try:
        server.wait(a.wait)
        for name, check in CHECKS.items():
            print(f"{name}: {check(server)}")
    except (OSError, ValueError, LookupError) as error:
        print(f"{a.url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
