"""What subscribers get over ZeroMQ, and what they may send."""

from __future__ import annotations

import errno
import pathlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from jaxllm.cache.events import DEVICE, KVEventBatch, KVEvents
from jaxllm.config import ConfigError
from jaxllm.kv_events import publisher as module
from jaxllm.kv_events.publisher import END, MAX_REQUEST, Publisher, ReplayBuffer
from jaxllm.kv_events.settings import KVEventSettings
from tests.engine.fake_loop import Loop, Setup
from tests.engine.scheduling.kv_event_consumer import Consumer, short

WAIT = 30_000  # milliseconds until a test fails


class Subscriber:
    """A peer of a publisher: it joins late, loses messages, and has missed ones sent again."""

    def __init__(self, settings: KVEventSettings, topic: bytes = b""):
        self.context = zmq.Context()
        self.sub = self._socket(zmq.SUB, settings.endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.dealer = self._socket(zmq.DEALER, settings.replay_endpoint or "")

    def _socket(self, kind: int, endpoint: str) -> Any:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, WAIT)
        socket.setsockopt(zmq.LINGER, 0)
        if endpoint:
            socket.connect(endpoint)
        return socket

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """The messages from number `first` on that are still kept."""
        self.dealer.send_multipart((b"", first.to_bytes(8)))
        found = []
        while True:
            empty, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> KVEventSettings:
    return KVEventSettings(
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv@pod@model",
        buffer_steps=40,
    )


@pytest.fixture
def publisher(settings: KVEventSettings) -> Iterator[Publisher]:
    made = Publisher(settings)
    yield made
    made.close()


@pytest.fixture
def subscriber(settings: KVEventSettings, publisher: Publisher) -> Iterator[Subscriber]:
    made = Subscriber(settings, b"kv@")
    yield made
    made.close()


def batch(*tokens: int) -> KVEventBatch:
    """A batch with one page."""
    heard: list[KVEventBatch] = []
    events = KVEvents(len(tokens))
    events.listeners.append(heard.append)
    events.stored([bytes(tokens)[-32:].rjust(32, b"\0")], None, list(tokens))
    events.flush()
    return heard[0]


def first_message(publisher: Publisher, subscriber: Subscriber, tries: int = 300) -> list[bytes]:
    """Publish until the subscription has arrived, of which a publisher hears nothing."""
    subscriber.sub.setsockopt(zmq.RCVTIMEO, 100)
    for _ in range(tries):
        publisher.publish(batch(1, 2))
        try:
            frames: list[bytes] = subscriber.sub.recv_multipart()
        except zmq.Again:
            continue
        subscriber.sub.setsockopt(zmq.RCVTIMEO, WAIT)
        return frames
    raise AssertionError("nothing was published")


def test_a_message_is_topic_number_and_payload(
    publisher: Publisher, subscriber: Subscriber
) -> None:
    before = time.time()
    topic, number, payload = first_message(publisher, subscriber)
    assert topic == b"kv@pod@model" and len(number) == 8
    publisher.publish(batch(7, 8, 9))
    while int.from_bytes(number) != publisher.next_number - 1:
        _, number, payload = subscriber.sub.recv_multipart()
    stamp, (event,), rank = msgspec.msgpack.decode(payload)
    assert before <= stamp <= time.time() and rank == 0
    assert event == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(bytes([7, 8, 9]))],
        "parent_block_hash": None,
        "token_ids": [7, 8, 9],
        "block_size": 3,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def test_events_are_arrays_where_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    settings = KVEventSettings(endpoint=f"ipc://{tmp_path}/events", format="array")
    publisher, subscriber = Publisher(settings), Subscriber(settings)
    *_, payload = first_message(publisher, subscriber)
    subscriber.close()
    publisher.close()
    _, ((name, hashes, parent, tokens, size, *rest),), _ = msgspec.msgpack.decode(payload)
    assert (name, parent, tokens, size) == ("BlockStored", None, [1, 2], 2) and len(hashes) == 1
    assert rest == [None, "GPU", None, None]


def test_a_late_subscriber_rebuilds_the_cache_from_a_replay_and_live_messages(
    settings: KVEventSettings,
) -> None:
    """With losses: whenever a number is missing, it is asked for."""
    draw = random.Random(3)
    roomy = replace(settings, buffer_steps=10_000)
    publisher, subscriber = Publisher(roomy), None
    loop, consumer, seen = Loop(Setup(page_size=3, num_pages=12)), Consumer(), 0
    loop.scheduler.events.listen(publisher.publish)
    for turn in range(120):
        loop.add([draw.randrange(1, 5) for _ in range(draw.randrange(1, 30))], draw.randrange(1, 9))
        for _ in range(draw.randrange(1, 6)):
            loop.step()
            loop.scheduler.events.flush()
        if turn % 37 == 36:
            loop.forget_prefixes()
        if turn == 20:
            subscriber = Subscriber(roomy)
        if subscriber is not None and turn % 10 == 9:
            while subscriber.sub.poll(0):
                _, number, payload = subscriber.sub.recv_multipart()
                if draw.random() < 0.3 or int.from_bytes(number) != seen:
                    continue  # lost, or behind a gap
                consumer.feed(payload)
                seen += 1
            for number, payload in subscriber.replay(seen):
                assert number == seen
                consumer.feed(payload)
                seen += 1
            assert loop.prefix is not None
            assert consumer.blocks.get(DEVICE, set()) == short(loop.prefix.pages.values())
    assert subscriber is not None and seen == publisher.next_number > 150
    subscriber.close()
    publisher.close()


def test_only_the_newest_messages_are_sent_again(
    settings: KVEventSettings, publisher: Publisher, subscriber: Subscriber
) -> None:
    for token in range(60):
        publisher.publish(batch(token))
    numbers = [number for number, _ in subscriber.replay(0)]
    assert numbers == list(range(60 - settings.buffer_steps, 60))
    assert subscriber.replay(60) == []


def test_the_bytes_of_the_buffer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUFFER", 100)
    buffer = ReplayBuffer(10)
    for number in range(6):
        buffer.append(number, bytes(30))
    assert [number for number, _ in buffer.since(0)] == [3, 4, 5]


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"", b"short"),
        (b"x", bytes(8)),
        (b"", bytes(8), b"more"),
        (b"", bytes(2 * MAX_REQUEST)),
    ],
    ids=["no-number", "short", "no-delimiter", "long", "huge"],
)
def test_what_is_no_request_harms_nobody(
    settings: KVEventSettings,
    publisher: Publisher,
    subscriber: Subscriber,
    frames: tuple[bytes, ...],
) -> None:
    bad = Subscriber(settings)
    bad.dealer.send_multipart(frames)
    publisher.publish(batch(5))
    assert len(subscriber.replay(0)) == 1
    bad.close()


def test_who_reads_no_replay_gets_no_other_and_holds_nobody_up(
    settings: KVEventSettings,
    publisher: Publisher,
    subscriber: Subscriber,
) -> None:
    for _ in range(settings.buffer_steps):
        publisher.publish(batch(*range(250)))
    greedy = Subscriber(settings)
    for _ in range(300):
        greedy.dealer.send_multipart((b"", (0).to_bytes(8)))
    assert len(subscriber.replay(0)) == settings.buffer_steps
    greedy.close()
    assert len(subscriber.replay(0)) == settings.buffer_steps


@pytest.mark.parametrize("why", [errno.EAGAIN, errno.EHOSTUNREACH])
def test_a_replay_ends_where_its_peer_takes_no_more(why: int, publisher: Publisher) -> None:
    class Router:
        sent = 0

        def send_multipart(self, frames: Any, flags: int) -> None:
            assert flags == zmq.DONTWAIT
            self.sent += 1
            if self.sent == 3:
                raise zmq.ZMQError(why)

    for _ in range(10):
        publisher.publish(batch(1))
    router = Router()
    publisher._replay(router, b"peer", 0)
    assert router.sent == 3


def test_publishing_never_waits_for_a_subscriber_that_reads_nothing(
    tmp_path: pathlib.Path,
) -> None:
    settings = KVEventSettings(endpoint=f"ipc://{tmp_path}/events", hwm=1)
    publisher, subscriber = Publisher(settings), Subscriber(settings)
    first_message(publisher, subscriber)
    big = batch(*range(200))
    for _ in range(5000):
        publisher.publish(big)
    subscriber.close()
    publisher.close()


def test_llm_d_reads_what_is_published(tmp_path: pathlib.Path) -> None:
    """By the rules of its adapter for vLLM: three parts, a number of 8 bytes, a topic of three
    parts, hashes that fit 64 bits or end in 8 bytes, and fields by their places."""
    settings = KVEventSettings(
        endpoint=f"ipc://{tmp_path}/events", topic="kv@10.0.0.7:8000@owner/model", format="array"
    )
    publisher, subscriber = Publisher(settings), Subscriber(settings, b"kv@")
    parts = first_message(publisher, subscriber)
    subscriber.close()
    publisher.close()
    assert len(parts) == 3 and len(parts[1]) == 8
    assert parts[0].decode().split("@") == ["kv", "10.0.0.7:8000", "owner/model"]
    stamp, events, *_ = msgspec.msgpack.decode(parts[2], type=tuple[float, list[msgspec.Raw], int])
    kind = tuple[str, list[int], int | None, list[int], int, int | None, str, str | None, Any]
    for raw in events:
        tag, hashes, _, tokens, size, *_ = msgspec.msgpack.decode(raw, type=kind)
        assert tag == "BlockStored" and len(tokens) == size * len(hashes)
        assert all(0 <= one < 2**64 for one in hashes) and max(tokens) < 2**32


def test_a_publisher_connects_to_a_subscriber_that_binds() -> None:
    """So llm-d's picker collects the events of many replicas at one address."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
    sub.setsockopt(zmq.RCVTIMEO, 100)
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publishers = [
        Publisher(
            KVEventSettings(endpoint=f"tcp://127.0.0.1:{port}", bind=False, topic=f"kv@{pod}@m")
        )
        for pod in "ab"
    ]
    heard: set[bytes] = set()
    for _ in range(300):
        for publisher in publishers:
            publisher.publish(batch(1, 2))
        try:
            while len(heard) < 2:
                heard.add(sub.recv_multipart()[0])
            break
        except zmq.Again:
            continue
    for publisher in publishers:
        publisher.close()
    context.destroy(linger=0)
    assert heard == {b"kv@a@m", b"kv@b@m"}


def test_an_address_in_use_is_one_line(settings: KVEventSettings, tmp_path: pathlib.Path) -> None:
    holder = zmq.Context()
    socket = holder.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigError, match=r"cannot bind tcp://127\.0\.0\.1:\d+: Address already"):
        Publisher(KVEventSettings(endpoint=f"tcp://127.0.0.1:{port}"))
    holder.destroy(linger=0)


def test_an_address_that_others_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Publisher(KVEventSettings(endpoint="tcp://*:0")).close()
    assert "whoever is there can read the token ids" in caplog.text
    caplog.clear()
    Publisher(KVEventSettings(endpoint="tcp://127.0.0.1:0")).close()
    assert not caplog.text


def test_a_missing_pyzmq_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"jaxllm\[kv-events\]"):
        Publisher(KVEventSettings())
