"""The backlog of a client that does not read its stream, and deltas that are not its fault."""

from __future__ import annotations

import asyncio

import pytest

from jaxllm.messages import TextDelta
from jaxllm.server.engine.streams import MAX_BACKLOG, Stream


class Sink:
    """Stands in for the client that owns a stream."""

    def __init__(self) -> None:
        self.aborted = self.reads = 0

    def abort(self, stream: Stream) -> None:
        self.aborted += 1
        stream.ids.clear()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def stream(sink: Sink) -> Stream:
    """One request's."""
    stream = Stream(sink.abort)
    stream.ids.add("x")
    return stream


MUCH = TextDelta(id="x", index=0, token_ids=[1] * 1000, text="")


def test_a_client_that_does_not_read_is_cut_off_before_its_backlog_grows(
    sink: Sink, stream: Stream
) -> None:
    stream.begin_write()
    for _ in range(MAX_BACKLOG // 1000 + 2):
        sink.reads += 1
        stream.push(0, MUCH, sink.reads)
    assert sink.aborted == 1


def test_what_a_step_says_at_once_is_no_backlog_however_much_it_is(
    sink: Sink, stream: Stream
) -> None:
    for sends in (False, True):
        sink.reads += 1
        if sends:
            stream.begin_write()
        for _ in range(MAX_BACKLOG // 500):
            stream.push(0, MUCH, sink.reads)
        assert sink.aborted == 0
        assert len(asyncio.run(stream.next_deltas())) == MAX_BACKLOG // 500


def test_what_comes_while_the_server_writes_a_reply_is_no_backlog_of_the_clients(
    sink: Sink, stream: Stream
) -> None:
    stream.push(0, MUCH, sink.reads)
    for _ in range(2):
        asyncio.run(stream.next_deltas())
        for _ in range(MAX_BACKLOG // 500):
            sink.reads += 1
            stream.push(0, MUCH, sink.reads)
        stream.begin_write()
        sink.reads += 1
        stream.push(0, MUCH, sink.reads)
    assert sink.aborted == 0
