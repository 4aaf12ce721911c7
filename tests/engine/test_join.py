"""Hosts that join keep what they need until they are together."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine import join
from jaxllm.hosts.controller import listen


def test_nobody_takes_the_port_of_jax_while_a_controller_waits_for_hosts(
    tmp_path: Path, tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tried = []

    def wait_for_hosts(*_: Any) -> Any:
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            listen("127.0.0.1", port)
        tried.append(port)

    monkeypatch.setattr(join, "Controller", wait_for_hosts)
    monkeypatch.setattr(join, "_join_devices", lambda place: listen(place.host, port).close())
    (tmp_path / "key").write_text("a key of sixteen bytes or more")
    config = EngineConfig(
        model=tiny_dir,
        nnodes=2,
        tensor_parallel_size=2,
        master_port=port - 1,
        group_key_file=str(tmp_path / "key"),
    )
    with join.joined(config):
        assert tried == [port]
