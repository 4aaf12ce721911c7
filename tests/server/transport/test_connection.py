"""A connection writes what h11 writes."""

from __future__ import annotations

import h11
import pytest

from jaxllm.server.transport.connection import Connection

LENGTH, CLOSE = (b"content-length", b"11"), (b"connection", b"close")


def written(
    connection: h11.Connection, version: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """A request's head is read, and a reply of three pieces sent; then the state."""
    connection.receive_data(b"GET / HTTP/%b\r\nhost: a\r\n\r\n" % version)
    head, end = connection.next_event(), connection.next_event()
    assert type(head) is h11.Request and type(end) is h11.EndOfMessage
    pieces = [h11.Data(data=piece) for piece in (b"hello ", b"", b"world")]
    events = [h11.Response(status_code=200, headers=headers), *pieces, h11.EndOfMessage()]
    sent = b"".join(connection.send(event) or b"" for event in events)
    return sent + repr((connection.our_state, connection.their_state)).encode()


@pytest.mark.parametrize("headers", [[], [LENGTH], [CLOSE]], ids=["chunks", "length", "close"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"], ids=["1.1", "1.0"])
def test_replies_are_those_of_h11(version: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    ours, theirs = Connection(h11.SERVER), h11.Connection(h11.SERVER)
    assert written(ours, version, headers) == written(theirs, version, headers)


def test_data_after_the_end_and_after_a_failure_is_refused_as_by_h11() -> None:
    connection = Connection(h11.SERVER)
    written(connection, b"1.1", [])
    for _ in range(2):  # the second time in the state of an error
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"more"))
