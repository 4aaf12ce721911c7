"""Where a server cannot listen, and what it says then."""

from __future__ import annotations

import contextlib
import pathlib
import socket

import pytest

from jaxllm.config import ConfigError
from jaxllm.server.transport.sockets import bind, bound


def test_a_unix_socket_that_is_in_use_is_not_to_be_removed_first(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="stop the program that listens there, remove"):
            bind("", 0, str(path))
        assert path.exists()


def test_a_path_that_can_be_no_unix_socket_is_only_to_be_changed(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none" / "s", tmp_path / ("a" * 200)):
        with pytest.raises(ConfigError, match=r"(directory|too long); choose another --uds"):
            bind("", 0, str(path))


def test_a_socket_of_a_server_that_does_not_listen_yet_is_left_to_it(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "a socket"
    with bind("", 0, str(path)):
        with pytest.raises(ConfigError, match="stop the program that listens there"):
            bind("", 0, str(path))
        assert path.exists()
    with bind("", 0, str(path)) as again:  # nobody has it any more
        assert again.getsockname() == str(path)


def test_a_port_of_a_server_that_does_not_listen_yet_is_left_to_it() -> None:
    with bound("127.0.0.1", 0, None) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: .*; stop the other program"):
            bound("127.0.0.1", port, None).__enter__()
    with bound("127.0.0.1", port, None):  # nobody has it any more
        pass


def test_the_file_of_a_unix_socket_goes_with_its_server_but_not_another_ones(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "s"
    with bound("", 0, str(path)):
        assert path.is_socket()
    assert not path.exists()
    with contextlib.ExitStack() as first:
        first.enter_context(bound("", 0, str(path))).close()  # the next one finds nobody there
        with bound("", 0, str(path)):
            first.close()
            assert path.is_socket()
        assert not path.exists()
