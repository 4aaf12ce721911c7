"""A client that is closed while it fetches: whatever it waits for, that ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from jaxllm.background.daemons import DaemonThreads
from jaxllm.kv_transfer.client import PageClient
from jaxllm.kv_transfer.server import PageServer, listen
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.together import TogetherClient
from jaxllm.kv_transfer.wire import Peer, TransferError, answer_greeting
from tests.kv_transfer.test_carriers import FINGERPRINT, KEY, NAMES, SIZE, page

LONG = 600.0  # seconds that a fetch may take
ENDS = """
import socket
from jaxllm.kv_transfer.client import PageClient
from jaxllm.kv_transfer.together import TogetherClient
from jaxllm.background.daemons import DaemonThreads
silent = socket.create_server(("127.0.0.1", 0))
client = TogetherClient(PageClient(b"k", b"f" * 32, 64), 1)
threads = DaemonThreads(1, "kv-fetch")
names = [number.to_bytes(32) for number in range(9)]
threads.submit(client.fetch, silent.getsockname(), names, 600.0, lambda key, page: None)
silent.accept()
print("ends")
"""


@pytest.fixture
def threads() -> Iterator[DaemonThreads]:
    threads = DaemonThreads(1, "fetch")
    yield threads
    threads.close(20)


def fetch(threads: DaemonThreads, client: PageClient, address: Any) -> Future[list[Any]]:
    return threads.submit(lambda: list(client.fetch(address, NAMES, LONG)))


def test_a_connection_that_is_not_accepted_is_given_up(
    threads: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = threading.Event(), socket.socket.connect_ex

    def connect(self: socket.socket, where: Any) -> int:
        error = real(self, where)
        begun.set()
        return error

    client = PageClient(KEY, FINGERPRINT, SIZE)
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        stack.enter_context(socket.create_connection(full.getsockname()))  # takes the only place
        monkeypatch.setattr(socket.socket, "connect_ex", connect, raising=False)
        fetched = fetch(threads, client, full.getsockname())
        assert begun.wait(20)
        client.close()
        assert isinstance(fetched.exception(20), TransferError)


@pytest.mark.parametrize("greets", [False, True])
def test_a_peer_that_says_nothing_is_left(threads: DaemonThreads, greets: bool) -> None:
    client = PageClient(KEY, FINGERPRINT, SIZE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fetched = fetch(threads, client, silent.getsockname())
        accepted, _ = silent.accept()
        with accepted:
            if greets:
                answer_greeting(Peer(accepted, time.monotonic() + 20), KEY)
            client.close()
            assert isinstance(fetched.exception(20), TransferError)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_page_that_is_on_its_way_is_not_awaited_and_no_connection_is_left(
    threads: DaemonThreads, shared: bool
) -> None:
    shelf, first = Shelf(len(NAMES), SIZE), threading.Event()
    shelf.announce(NAMES)  # of which the first alone comes
    shelf.put(NAMES[0], [page(0)])
    server = PageServer(listen("127.0.0.1", 0), KEY, shelf, FINGERPRINT, SIZE)
    client = PageClient(KEY, FINGERPRINT, SIZE, shared)

    def take() -> None:
        for _ in client.fetch(("127.0.0.1", server.port), NAMES, LONG):
            first.set()

    fetched = threads.submit(take)
    assert first.wait(20)
    client.close()
    assert isinstance(fetched.exception(20), TransferError)
    assert client.idle == [] and {each.fileno() for each in client.sockets} <= {-1}
    with pytest.raises(TransferError, match="fetches no more"):
        list(client.fetch(("127.0.0.1", server.port), NAMES, LONG))
    server.close()


def test_who_waits_for_several_connections_learns_that_they_are_closed(
    threads: DaemonThreads,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = TogetherClient(PageClient(KEY, FINGERPRINT, SIZE), 1)

        def keep(key: bytes, page: np.ndarray) -> None:
            raise AssertionError("nothing comes")

        fetched = threads.submit(client.fetch, silent.getsockname(), NAMES, LONG, keep)
        silent.accept()[0].close()
        client.close()
        assert isinstance(fetched.result(20), TransferError)
        assert isinstance(client.fetch(silent.getsockname(), NAMES, LONG, keep), TransferError)


def test_a_process_ends_though_a_peer_has_stopped() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ends\n", b"")
