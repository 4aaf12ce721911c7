"""Listening sockets, and the files that a server may open."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxllm.config import ConfigError

BACKLOG = 2048
MAX_FILES = 1 << 16


@contextlib.contextmanager
def bound(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """`bind`'s socket, at an address that no other server has bound in this way. The file of a
    Unix socket goes with it, if it is still this one's."""
    with bind(host, port, uds) as sock, claimed(sock):
        if uds is None:
            yield sock
            return
        bound_file = _file(uds)
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if _file(uds) == bound_file:
                    Path(uds).unlink()


@contextlib.contextmanager
def claimed(sock: socket.socket) -> Iterator[None]:
    """No other server begins to load for this address. Raises ConfigError when one has: Linux lets
    several programs bind a port until one listens, which a server does once it has its model's
    files."""
    if sock.family == socket.AF_UNIX or sys.platform != "linux":
        yield
        return
    host, port = sock.getsockname()[:2]
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0jaxllm serves {host} {port}")  # without a file, gone with its process
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(host, port, error) from None
        yield


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port}: {error.strerror}; "
        "stop the other program or choose another --port"
    )


def _file(path: str) -> tuple[int, int, int]:
    """Which file is there: the number of one that is gone may be another's."""
    status = Path(path).stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def bind(host: str, port: int, uds: str | None) -> socket.socket:
    """A bound socket: the Unix socket `uds`, or else `host` and `port`. Raises ConfigError."""
    if uds is not None:
        return bind_unix(Path(uds))
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror or error}; check --host"
        ) from None
    family, socket_type, protocol, _, address = addresses[0]
    # With the protocol named, asyncio turns Nagle's algorithm off. It would hold a token back, up
    # to 40 ms, until the client has acknowledged the one before.
    sock = socket.socket(family, socket_type, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _taken(host, port, error) from None
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A bound Unix socket; a stale one at `path` is replaced. Raises ConfigError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) != 0 and not is_bound(path):
                    path.unlink()
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        remedy = "choose another --uds"
        if error.errno == errno.EADDRINUSE:
            remedy = f"stop the program that listens there, remove what else is there, or {remedy}"
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; {remedy}") from None
    return sock


def is_bound(path: Path) -> bool:
    """Whether a process has a socket at this path, though it may not listen yet: a server that
    downloads its model. False where the system does not tell."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return False
    # The eighth column, which sockets without a path lack
    bound = {column for line in lines for column in line.split(maxsplit=7)[7:]}
    return not bound.isdisjoint({str(path), str(path.absolute())})


def listen(sock: socket.socket) -> None:
    """Accept connections from here on. Raises ConfigError when another program listens there."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {sock.getsockname()}: {error.strerror}; "
            "choose another --port or --uds"
        ) from None


def raise_file_limit() -> None:
    """Raise the limit of open files, which connections are, to the system's hard limit or to
    MAX_FILES; by default it is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
