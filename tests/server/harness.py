"""A real HTTP server on a loopback port in a thread of its own, with the fake engine in another."""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
import ssl
import threading
from dataclasses import replace
from typing import Any, Self

from jaxllm.config import EngineConfig
from jaxllm.server.app import BODY_FIELDS, build
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.group import EngineGroup
from jaxllm.server.engine.loading import Factory
from jaxllm.server.engine.process import EngineProcess
from jaxllm.server.state import ServerState, Settings
from jaxllm.server.transport.event_loop import new_event_loop
from jaxllm.server.transport.http import HttpServer, http_server
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control, make

SETTINGS = Settings(served=("fake", "alias"), root="fake")


class Running:
    """Use as a context manager. `control` steers the engine; `server_state` is the server's
    inside."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        settings: Settings = SETTINGS,
        root_path: str = "",
        defaults: dict[str, Any] | None = None,
        config: EngineConfig = EngineConfig(model="fake"),  # noqa: B008, frozen
        tls: ssl.SSLContext | None = None,
        engines: int = 1,
    ):
        self._tls = tls
        self._config, self._count = config, engines
        self.control = Control()
        self._tokenizer, self._settings, self._root_path, self._defaults = (
            tokenizer,
            settings,
            root_path,
            defaults or {},
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._server: HttpServer
        self.server_state: ServerState
        self.loop: asyncio.AbstractEventLoop
        self.engine_sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        pairs = [socket.socketpair() for _ in range(self._count)]
        self.engine_sockets = [theirs for _, theirs in pairs]
        self._engines = [
            threading.Thread(target=EngineProcess(sock, self.factory()).run)
            for sock in self.engine_sockets
        ]
        self.http = threading.Thread(
            target=lambda: asyncio.run(
                self._serve([ours for ours, _ in pairs]), loop_factory=new_event_loop
            )
        )
        for thread in (*self._engines, self.http):
            thread.start()
        assert self._up.wait(60)
        return self

    def factory(self) -> Factory:
        """What makes an engine; asked for each."""
        return make(self.control, self._tokenizer)

    def __exit__(self, *error: object) -> None:
        self.control.go.set()
        self._server.should_exit = True
        self.http.join(60)
        for engine in self._engines:
            engine.join(60)
        assert not self.http.is_alive()
        assert not any(engine.is_alive() for engine in self._engines)

    async def _serve(self, sockets: list[socket.socket]) -> None:
        self.loop = asyncio.get_running_loop()
        clients = [EngineClient(self._config, tells_prefixes=self._count > 1) for _ in sockets]
        for client, ours in zip(clients, sockets, strict=True):
            await client.connect(ours)
        group = EngineGroup(clients)
        self.server_state = ServerState(
            self._settings, group, self._tokenizer, self._defaults, BODY_FIELDS
        )
        self._server = http_server(build(self.server_state), self._root_path, self._tls)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0)
        self._up.set()
        await serving
        for client in clients:
            client.stop()
        await self.server_state.shut_down()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request over a connection of its own; `body` is sent as JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, path, data, {"content-type": "application/json", **(headers or {})}
            )
            reply = connection.getresponse()
            return Answer(
                reply.status,
                {name.lower(): value for name, value in reply.getheaders()},
                reply.read(),
            )
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """POST."""
        return self.request("POST", path, body, headers)

    def get(self, path: str, **headers: str) -> Answer:
        """GET."""
        return self.request("GET", path, None, headers)

    def begin(self, path: str, body: dict[str, Any]) -> Open:
        """Send a request and leave its connection open; the caller closes it."""
        data = json.dumps(body).encode()
        return self.begin_raw(post_head(path, len(data)) + data)

    def begin_raw(self, data: bytes) -> Open:
        """Send bytes as they are over a connection that the caller closes."""
        return Open(self.port, data)


def post_head(path: str, length: int) -> bytes:
    """The head of a POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


class Open:
    """A connection with a request under way; a context manager.

    Attributes:
        socket: of the connection.
    """

    def __init__(self, port: int, data: bytes):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=240)
        self._reader = self.socket.makefile("rb")
        self.socket.sendall(data)

    def send(self, data: bytes) -> None:
        """More of the request."""
        self.socket.sendall(data)

    def cut_off(self) -> bool:
        """Send until the server takes no more."""
        try:
            while True:
                self.send(b"z" * 100)
        except (ConnectionResetError, BrokenPipeError):
            return True

    def readable(self) -> bool:
        """Whether some of the reply has arrived."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def status(self) -> int:
        """The status line; waits for it."""
        return int(self._reader.readline().split()[1])

    def line(self) -> bytes:
        """The next line of the reply."""
        return self._reader.readline()

    def answer(self) -> Answer:
        """The whole reply, which must say its length; the connection stays open."""
        status, headers = self.status(), {}
        while line := self.line().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return Answer(status, headers, self._reader.read(int(headers["content-length"])))

    def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        return self._reader.read()

    def closed(self) -> bool:
        """Wait until the server hangs up without a word."""
        try:
            return self._reader.read() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        """Leave."""
        self._reader.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Answer:
    """Status, headers (lower case) and body of a reply."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes):
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the envelope, whose shape is checked on the way."""
        found = self.json()
        assert list(found) == ["error"]
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        assert "x-request-id" in self.headers
        return found["error"]

    def events(self) -> list[Any]:
        """The server-sent events; the last one must be [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def with_settings(**changes: Any) -> Settings:
    """The default settings with changes."""
    return replace(SETTINGS, **changes)
