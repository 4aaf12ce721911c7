"""A client of a running server, for people at a terminal, of the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TIMEOUT = 600.0  # seconds between two bytes
BROKEN = (OSError, http.client.HTTPException)  # what a connection that ends early raises


class Refused(Exception):
    """What the server, or the way to it, has to say; one line for the user."""


@dataclass(frozen=True)
class Client:
    """A server's address, with or without /v1 at its end, and a key of it."""

    url: str
    key: str | None = None

    def model(self) -> str:
        """The first model that is served."""
        with self._open("/models", None) as reply:
            try:
                return str(json.load(reply)["data"][0]["id"])
            except (*BROKEN, ValueError, LookupError, TypeError):
                raise self._stranger() from None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream as they come. Closing the iterator ends the request."""
        with self._open(path, body | {"stream": True}) as reply:
            for line in _lines(reply):
                data = line.strip().removeprefix(b"data: ")
                if not data or data == line.strip():
                    continue
                if data == b"[DONE]":
                    return
                yield self._event(data)
        raise Refused("the server ended the answer before it was finished")

    def _event(self, data: bytes) -> dict[str, Any]:
        """An event with choices. Raises Refused."""
        try:
            event: dict[str, Any] = json.loads(data)
            message = None
            if "error" in event:
                message = str(event["error"]["message"])
            strange = message is None and not isinstance(event["choices"], list)
        except (ValueError, LookupError, TypeError):
            raise self._stranger() from None
        if strange:
            raise self._stranger()
        if message is not None:
            raise Refused(message)
        return event

    def _stranger(self) -> Refused:
        return Refused(
            f"what answers at {self.url} does not speak the OpenAI protocol; "
            "give the address of `jaxllm serve` as --url"
        )

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        try:
            data = None
            if body is not None:
                data = json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # bytes of the command line or of a file, kept as surrogates
            raise Refused("the text is not valid UTF-8") from None
        try:
            request = urllib.request.Request(f"{base}/v1{path}", data, headers)
            reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(_message(error)) from None
        except (*BROKEN, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Refused(
                f"no server at {base} ({reason}); "
                "start one with `jaxllm serve MODEL`, or give --url"
            ) from None
        return reply


def _lines(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """What comes until the connection ends, whether well or not."""
    with contextlib.suppress(*BROKEN):
        yield from reply


def _message(error: urllib.error.HTTPError) -> str:
    """The message of a refusal's body."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {error.code} {error.reason}"
