"""Pages between a server and a client: both carriers, what is missing, and what is damaged."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.kv_transfer import ring as ring_module
from jaxllm.kv_transfer.checksum import checksum
from jaxllm.kv_transfer.client import PageClient
from jaxllm.kv_transfer.cores import CORES
from jaxllm.kv_transfer.ring import Ring
from jaxllm.kv_transfer.server import PageServer, listen
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.together import LEAST, TogetherClient, divide
from jaxllm.kv_transfer.wire import TransferError

KEY, FINGERPRINT, SIZE = b"k" * 16, b"f" * 32, 5003
CARRIERS = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
NAMES = [number.to_bytes(32) for number in range(40)]


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf(len(NAMES), SIZE)
    shelf.expect(NAMES)
    for number, name in enumerate(NAMES):
        shelf.put(name, [page(number)[:7], page(number)[7:]])
    return shelf


@pytest.fixture
def server(shelf: Shelf) -> Iterator[PageServer]:
    server = PageServer(listen("127.0.0.1", 0), KEY, shelf, FINGERPRINT, SIZE)
    yield server
    server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., PageClient]]:
    made: list[PageClient] = []

    def connect(key: bytes = KEY, fingerprint: bytes = FINGERPRINT, *more: Any) -> PageClient:
        made.append(PageClient(key, fingerprint, *(more or (SIZE,))))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def fetched(server: PageServer, client: PageClient, names: list[bytes] = NAMES) -> list[bytes]:
    address = ("127.0.0.1", server.port)
    return [one.tobytes() for one in client.fetch(address, names, 20.0)]


@CARRIERS
def test_pages_arrive_in_order_and_again_over_the_same_connection(
    shared, server, monkeypatch, connect, tmp_path
):
    monkeypatch.setattr(ring_module, "FOLDER", tmp_path)  # where no other process has rings
    monkeypatch.setattr(ring_module, "SIZE", 3 * SIZE)  # fewer slots than pages
    client = connect(KEY, FINGERPRINT, SIZE, shared)
    wanted = [page(number).tobytes() for number in range(len(NAMES))]
    assert fetched(server, client) == wanted
    assert fetched(server, client) == wanted and len(client.idle) == 1
    assert fetched(server, client, []) == []
    assert not list(tmp_path.iterdir()), "no name is left"


def test_the_longest_stored_prefix_comes_and_nothing_behind_a_gap(server, shelf, connect):
    shelf.forget([NAMES[3]])
    client = connect()
    assert len(fetched(server, client)) == 3
    assert fetched(server, client, [b"?" * 32, *NAMES]) == []


@CARRIERS
def test_a_damaged_page_ends_a_fetch_and_those_before_it_count(shared, server, shelf, connect):
    with shelf.reading(NAMES[5], 0.0) as damaged:
        damaged.data[4321] ^= 1
    client = connect(KEY, FINGERPRINT, SIZE, shared)
    pages = client.fetch(("127.0.0.1", server.port), NAMES, 20.0)
    for number in range(5):
        assert next(pages).tobytes() == page(number).tobytes()
    with pytest.raises(TransferError, match="page 5 of 40 is damaged"):
        next(pages)
    assert client.idle == []


def test_pages_of_another_model_or_size_are_refused(server, connect):
    for client in (connect(KEY, b"g" * 32), connect(KEY, FINGERPRINT, SIZE + 1)):
        with pytest.raises(TransferError, match="another model or layout"):
            fetched(server, client)


def test_who_has_another_key_gets_nothing_and_neither_side_tells_its_own(server, connect):
    with pytest.raises(TransferError, match="another key"):
        fetched(server, connect(b"x" * 16))


def test_a_connection_that_the_peer_has_closed_is_made_anew(shelf, connect):
    client = connect()
    server = PageServer(listen("127.0.0.1", 0), KEY, shelf, FINGERPRINT, SIZE)
    assert len(fetched(server, client)) == 40
    server.close()
    other = PageServer(listen("127.0.0.1", server.port), KEY, shelf, FINGERPRINT, SIZE)
    assert len(fetched(other, client)) == 40
    other.close()
    with pytest.raises(TransferError, match=r"refused|closed|reset"):
        fetched(other, client)


def test_a_peer_that_says_nothing_costs_the_time_that_a_fetch_may_take(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect()
        for why in ("time is up|timed out", "did not answer in time just now"):
            with pytest.raises(TransferError, match=why):
                list(client.fetch(silent.getsockname(), NAMES, 0.05))


def test_a_peer_is_not_blamed_for_time_that_it_did_not_have(server, shelf):
    address = ("127.0.0.1", server.port)
    client = PageClient(KEY, FINGERPRINT, SIZE, patience=0.5)
    assert len(fetched(server, client)) == 40
    for seconds in (-1.0, 0.0):  # fetches that have waited for others
        with pytest.raises(TransferError, match="time is up"):
            list(client.fetch(address, NAMES, seconds))
        assert len(fetched(server, client)) == 40
    assert len([time.sleep(0.03) for _ in client.fetch(address, NAMES, 0.6)]) == 40, "each has it"
    client.close()


def test_without_shared_memory_pages_come_over_tcp(server, monkeypatch, tmp_path, connect):
    monkeypatch.setattr(ring_module, "FOLDER", tmp_path / "nowhere")
    assert len(fetched(server, connect())) == 40


@CARRIERS
def test_pages_come_one_by_one_while_others_are_on_their_way(shared, server, shelf, connect):
    late = [NAMES[38], NAMES[39]]
    shelf.forget(late)
    shelf.announce(late)
    pages = connect(KEY, FINGERPRINT, SIZE, shared).fetch(("127.0.0.1", server.port), NAMES, 20.0)
    assert len([next(pages) for _ in range(38)]) == 38, "those before them have come already"
    assert shelf.expect(NAMES) == [38, 39] and shelf.expect(NAMES) == []
    for number in (38, 39):
        shelf.put(NAMES[number], [page(number)])
        assert next(pages).tobytes() == page(number).tobytes()
    assert list(pages) == []


@CARRIERS
def test_a_fetch_ends_where_a_page_does_not_come_and_the_connection_is_used_again(
    shared, server, shelf, connect
):
    client = connect(KEY, FINGERPRINT, SIZE, shared)
    shelf.forget([NAMES[20]])
    shelf.announce(NAMES)
    shelf.announce(NAMES[:30])
    shelf.withdraw(NAMES)
    pages = client.fetch(("127.0.0.1", server.port), NAMES, 20.0)
    assert len([next(pages) for _ in range(20)]) == 20
    shelf.withdraw(NAMES[:30])  # whoever computed it has ended
    assert list(pages) == [] and len(client.idle) == 1
    assert len(fetched(server, client)) == 20 and shelf.coming(NAMES) == 20


def test_a_page_that_does_not_come_in_time_ends_a_fetch(server, shelf, connect):
    shelf.forget([NAMES[1]])
    shelf.announce(NAMES)
    pages = connect().fetch(("127.0.0.1", server.port), NAMES, 0.1)
    assert next(pages).tobytes() == page(0).tobytes()
    with pytest.raises(TransferError, match="timed out"):
        next(pages)


def test_a_full_shelf_drops_what_was_used_least_recently_and_chains_from_their_end():
    shelf = Shelf(3, SIZE)
    for number in range(3):
        shelf.put(NAMES[number], [page(number)])
    assert shelf.coming(NAMES[:3]) == 3
    shelf.put(NAMES[9], [page(9)])
    assert shelf.coming(NAMES[:3]) == 2 and len(shelf) == 3


def test_a_page_that_is_being_read_stays_as_it_is():
    shelf = Shelf(2, SIZE)
    for number in range(2):
        shelf.put(NAMES[number], [page(number)])
    with shelf.reading(NAMES[0], 0.0) as read:
        for number in range(2, 9):
            shelf.put(NAMES[number], [page(number)])
        assert shelf.coming(NAMES[:1]) == 1
        shelf.forget(NAMES)
        shelf.put(NAMES[9], [page(9)])
        with shelf.reading(NAMES[9], 0.0):
            shelf.put(NAMES[10], [page(10)])
        assert shelf.coming(NAMES[10:11]) == 0, "every place is being read"
        assert read.data.tobytes() == page(0).tobytes()
    shelf.put(NAMES[10], [page(10)])
    assert shelf.coming(NAMES[9:11]) == 2


@pytest.mark.parametrize("size", [1, 8, 4095, 4096, 4097, 3 * 4096 + 11])
def test_a_checksum_shows_every_change_of_a_byte(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    whole = checksum(data)
    for at in {0, size // 2, size - 1}:
        changed = data.copy()
        changed[at] ^= 1
        assert checksum(changed) != whole
    assert checksum(np.append(data, np.uint8(0))) != whole


def test_memory_of_another_user_size_or_kind_is_not_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_module, "FOLDER", tmp_path)
    made = Ring.make(SIZE)
    for name in ("../etc/passwd", "jaxllm-kv-", made.name + "/"):
        with pytest.raises(ValueError, match="another name"):
            Ring.open(name, SIZE)
    with pytest.raises(ValueError, match="another size"):
        Ring.open(made.name, ring_module.SIZE)
    link = "jaxllm-kv-" + "0" * 32
    (tmp_path / link).symlink_to(tmp_path / made.name)
    with pytest.raises(OSError, match="symbolic"):
        Ring.open(link, SIZE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError):
        Ring.open(made.name, SIZE)


def test_an_address_in_use_is_one_line(server, shelf):
    with pytest.raises(ConfigError, match=r"cannot bind 127.0.0.1 port \d+: .*; choose another"):
        PageServer(listen("127.0.0.1", server.port), KEY, shelf, FINGERPRINT, SIZE)


type Come = tuple[dict[bytes, bytes], Exception | None]


def come(client: TogetherClient, server: PageServer) -> Come:
    """The pages that a fetch brings, and its error."""
    kept: dict[bytes, bytes] = {}
    address = ("127.0.0.1", server.port)

    def keep(key: bytes, page: np.ndarray) -> None:
        kept[key] = page.tobytes()

    error = client.fetch(address, NAMES, 20.0, keep)
    return kept, error


@CARRIERS
def test_several_connections_bring_the_longest_stored_prefix(shared, server, shelf, connect):
    client = TogetherClient(connect(KEY, FINGERPRINT, SIZE, shared), 1)
    assert len(divide(NAMES)) == CORES
    assert sorted(name for part in divide(NAMES) for name in part) == NAMES
    wanted = {name: page(number).tobytes() for number, name in enumerate(NAMES)}
    assert come(client, server) == (wanted, None)
    shelf.forget([NAMES[13]])
    kept, error = come(client, server)
    assert error is None and kept.keys() >= {*NAMES[:13]} and NAMES[13] not in kept
    with shelf.reading(NAMES[5], 0.0) as damaged:
        damaged.data[4321] ^= 1
    kept, error = come(client, server)
    assert "is damaged" in str(error) and NAMES[5] not in kept
    assert all(wanted[name] == data for name, data in kept.items())
    client.close()


def test_what_keeping_a_page_raises_ends_a_fetch(server, connect):
    client = TogetherClient(connect(), 1)

    def full(key: bytes, page: np.ndarray) -> None:
        raise MemoryError("no room")

    error = client.fetch(("127.0.0.1", server.port), NAMES, 20.0, full, MemoryError)
    assert str(error) == "no room"
    with pytest.raises(MemoryError):
        client.fetch(("127.0.0.1", server.port), NAMES, 20.0, full)
    client.close()


def test_a_fetch_that_has_ended_brings_nothing_more(server, shelf, connect):
    kept, ended, begun = list[bytes](), threading.Event(), threading.Barrier(CORES)

    def keep(key: bytes, page: np.ndarray) -> None:
        kept.append(key)
        if len(kept) <= CORES:
            begun.wait(20)
        if key == NAMES[0]:
            raise MemoryError("no room")
        assert ended.wait(20)

    client = TogetherClient(connect(), 1)
    error = client.fetch(("127.0.0.1", server.port), NAMES, 20.0, keep, MemoryError)
    ended.set()
    client._threads.close(20)
    assert str(error) == "no room" and len(kept) == CORES
    client.close()


def test_few_pages_take_one_connection():
    for count in (LEAST, 2 * LEAST - 1):
        assert divide(NAMES[:count]) == [NAMES[:count]]
    assert divide(NAMES[: 2 * LEAST]) == [NAMES[: 2 * LEAST : 2], NAMES[1 : 2 * LEAST : 2]]
    assert divide([]) == [[]]
