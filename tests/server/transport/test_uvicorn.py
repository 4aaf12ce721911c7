"""What `transport.http` relies on inside uvicorn and h11. A failure here means that uvicorn moved
its internals: adapt `transport/http.py` before raising the bound in pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import inspect
import tomllib
from pathlib import Path

import h11
import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from jaxllm.server.transport.http import HttpProtocol, HttpServer, HttpState, http_server


def test_the_uvicorn_that_is_tested_is_within_a_bounded_range() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    bound = next(one.specifier for one in found if one.name == "uvicorn")
    installed = importlib.metadata.version("uvicorn")
    assert any(one.operator == "<" for one in bound), "newer internals were never tested"
    assert installed in bound, f"uvicorn {installed} was never tested with transport/http.py"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("connection_made", ["self", "transport"]),
        ("connection_lost", ["self", "exc"]),
        ("data_received", ["self", "data"]),
        ("on_response_complete", ["self"]),
        ("pause_writing", ["self"]),
        ("resume_writing", ["self"]),
        ("send_400_response", ["self", "msg"]),
        ("shutdown", ["self"]),
    ],
)
def test_every_hook_is_still_one_of_uvicorns(name: str, parameters: list[str]) -> None:
    assert name in vars(HttpProtocol)
    assert list(inspect.signature(getattr(H11Protocol, name)).parameters) == parameters


def test_uvicorn_calls_the_hooks_and_keeps_the_attributes_that_are_read() -> None:
    source = inspect.getsource(H11Protocol)
    for call in ("self.send_400_response(msg)", "on_response=self.on_response_complete"):
        assert call in source, f"uvicorn no longer has {call}"
    for name in ("conn", "transport", "loop", "cycle", "server_state"):
        assert f"self.{name}" in source, f"connections have no {name} any more"
    cycle = inspect.getsource(RequestResponseCycle)
    for name in ("disconnected", "message_event"):
        assert f"self.{name}" in cycle, f"request cycles have no {name} any more"
    assert {"SEND_BODY", "ERROR", "DONE", "IDLE", "SEND_RESPONSE"} <= set(vars(h11))
    assert hasattr(h11.Connection(h11.SERVER), "trailing_data")
    for use in ("h11.Connection(", "self.conn.send(event=h11.Data(data=data))"):
        assert use in source + cycle, f"uvicorn no longer has {use}"


def test_the_server_gives_connections_the_state_that_counts_their_bytes() -> None:
    server = http_server(None, "")
    assert isinstance(server, HttpServer)
    assert isinstance(server.server_state, HttpState)
    assert list(inspect.signature(uvicorn.Server.capture_signals).parameters) == ["self"]
    for name in ("should_exit", "force_exit"):
        assert getattr(server, name) is False
